"""Numbers of a run: tokens/s, model FLOP/s, MFU, memory; one greppable line a step, JSONL and TensorBoard.

Peaks are dense bf16 FLOP/s of one chip as JAX counts devices, from the makers' data sheets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpp import runtime
from jaxpp.mesh import Device

PEAK_FLOPS_PER_S: dict[str, float] = {
    "TPU v3": 61.5e12,  # one core of two
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L4": 121e12,
    "L40S": 362e12,
}


def peak_flops_per_s(device: Device) -> float | None:
    """Return the peak of one device, None where the table does not know it.

    The longest name in the table that the device's kind contains wins.
    """
    names = [name for name in PEAK_FLOPS_PER_S if name.lower() in device.device_kind.lower()]
    return PEAK_FLOPS_PER_S[max(names, key=len)] if names else None


def memory_record() -> dict[str, Any]:
    """Return the peak memory so far: of the fullest local device, or of the process where devices do not say (CPU)."""
    on_device = runtime.device_memory_bytes()
    where = "host" if on_device is None else "device"
    return {"memory_bytes": on_device or runtime.peak_host_bytes(), "memory_of": where}


@dataclass(frozen=True)
class Rates:
    """What turns seconds per step into rates.

    Args:
        tokens_per_step: of the global batch.
        flops_per_token: forward and backward (`jaxpp.dims.flops_per_token`).
        num_devices: of the mesh.
        peak_flops_per_s: of one device; None: MFU is not known.
    """

    tokens_per_step: int
    flops_per_token: int
    num_devices: int
    peak_flops_per_s: float | None

    def at(self, seconds: float) -> dict[str, float | None]:
        """Return tokens/s, model FLOP/s (all devices) and MFU for a step of `seconds`."""
        flops = self.flops_per_token * self.tokens_per_step / seconds
        peak = self.peak_flops_per_s
        return {
            "tokens_per_s": self.tokens_per_step / seconds,
            "model_flops_per_s": flops,
            "mfu": None if peak is None else flops / (peak * self.num_devices),
        }


def train_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Write one step as one line: step, loss, lr, grad norm, s/step, tokens/s, FLOP/s, MFU, memory."""
    mfu = "n/a" if record["mfu"] is None else f"{100 * record['mfu']:.1f}%"
    memory = f"{record['memory_bytes'] / 2**30:.2f} GiB ({record['memory_of']})"
    return (
        f"step {record['step']}/{num_steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
        f"grad_norm {record['grad_norm']:.3f}  s/step {record['seconds']:.3f}  "
        f"tokens/s {record['tokens_per_s']:,.0f}  TFLOP/s {record['model_flops_per_s'] / 1e12:.3f}  "
        f"MFU {mfu}  memory {memory}"
    )


def evaluation_line(record: Mapping[str, Any]) -> str:
    """Write one evaluation as one line."""
    bits = "  bits/byte n/a" if record["bits_per_byte"] is None else f"  bits/byte {record['bits_per_byte']:.4f}"
    return f"eval {record['step']}  loss {record['loss']:.4f}{bits}  tokens {record['tokens']:,.0f}"


def forget_after(path: Path, step: int) -> None:
    """Drop the records of a JSONL file that lie beyond `step`: a resumed run will write them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue  # the last line of a killed run may be cut
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)


@dataclass
class MetricsLog:
    """Writes records to ``metrics.jsonl`` and ``tensorboard/`` of a run's directory.

    Args:
        directory: of the run.
        step: records beyond this step, left by a run that was killed, are dropped.
    """

    directory: Path
    step: int
    _tensorboard: Any = field(init=False)

    def __post_init__(self) -> None:
        from tensorboardX import SummaryWriter

        forget_after(self.directory / "metrics.jsonl", self.step)
        self._lines = (self.directory / "metrics.jsonl").open("a", buffering=1)
        self._tensorboard = SummaryWriter(str(self.directory / "tensorboard"), purge_step=self.step + 1)

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append one record, ``kind`` being ``train`` or ``eval``."""
        self._lines.write(json.dumps({"kind": kind, **record}) + "\n")
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._tensorboard.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close both."""
        self._lines.close()
        self._tensorboard.close()
