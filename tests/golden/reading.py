"""Read the golden cases without torch: their configurations, weights and expected logits.

A case is a directory under `families/`. Its weights are not stored: `tensors.json` gives the shape, deviation and mean
of each tensor, and the numbers come from `numpy.random.RandomState`, whose streams NumPy has frozen.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

FAMILIES = Path(__file__).parent / "families"
CHECKSUMS = FAMILIES / "checksums.json"
LATER = ("layer_types", "use_bidirectional_attention")  # see `early`


@dataclass(frozen=True)
class Golden:
    """One case as stored.

    Attributes:
        name: Directory below `families/`.
        config: `config.json` as transformers 5 writes it.
        config_v4: The same model as transformers 4 writes it.
        arrays: What the reference computed in float32 unless said otherwise:
            `tokens` [2, 24] int32 and `logits` [2, 24, vocab];
            `padded_tokens` [3, 12] left-padded, `padding` [3, 12] int32 with 1 at real tokens, and `padded_logits`
            [real, vocab], the rows of `logits[padding == 1]`;
            `greedy_prompt` [8] and its greedy continuation `greedy_new` [16];
            in some cases `long_tokens` [1, 48] and `long_logits` (past the original context);
            in some `logits_bf16`, of `tokens`, weights rounded to bfloat16 and computed in bfloat16 (kept as float32),
            and `logits_bf16_weights`, of the rounded weights computed in float32.
    """

    name: str
    config: dict[str, Any]
    config_v4: dict[str, Any]
    arrays: dict[str, np.ndarray]


def cases() -> list[str]:
    """List the names of all cases."""
    return sorted(path.name for path in FAMILIES.iterdir() if path.is_dir())


def fused_cases() -> list[str]:
    """List the cases that also exist with all experts of a layer in one tensor."""
    return [name for name in cases() if (FAMILIES / name / "tensors_fused.json").exists()]


def load(name: str) -> Golden:
    """Read a case: both configurations and the expected arrays."""
    folder = FAMILIES / name
    with np.load(folder / "golden.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    return Golden(name, _json(folder / "config.json"), _json(folder / "config_v4.json"), arrays)


def weights(name: str, *, fused: bool = False) -> dict[str, np.ndarray]:
    """Draw the float32 weights of a case under the names of its checkpoint.

    Args:
        name: The case.
        fused: Give the form of `save_original_format=False`: the experts of a layer stacked in one tensor. Equal
            weights, other names; only for `fused_cases()`.
    """
    plain = draw(name, _json(FAMILIES / name / "tensors.json"))
    return fuse(plain, _json(FAMILIES / name / "tensors_fused.json")) if fused else plain


def draw(name: str, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Draw every tensor from its own stream: normal numbers times `deviation` plus `mean`, as float32."""
    drawn = {}
    for tensor, entry in tensors.items():
        stream = np.random.RandomState(seed(name, tensor))
        normal = stream.standard_normal(entry["shape"])
        drawn[tensor] = (normal * entry["deviation"] + entry["mean"]).astype(np.float32)
    return drawn


def seed(name: str, what: str) -> int:
    """Give the seed of one tensor or one batch of a case."""
    return zlib.crc32(f"{name}/{what}".encode())


def fuse(plain: Mapping[str, np.ndarray], entries: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Build the fused tensors from the plain ones.

    Args:
        plain: Tensors by name.
        entries: `tensors_fused.json`: each fused name has `copy`, one plain name, or `stack`, a list over experts of
            lists of plain names: the names of one expert are concatenated by rows, the experts then stacked.
    """
    fused = {}
    for name, entry in entries.items():
        if "copy" in entry:
            fused[name] = plain[entry["copy"]]
        else:
            fused[name] = np.stack([np.concatenate([plain[part] for part in parts]) for parts in entry["stack"]])
    return fused


def checksum(drawn: Mapping[str, np.ndarray]) -> int:
    """Give one number for all tensors, their names and their order."""
    total = 0
    for name, value in drawn.items():
        total = zlib.crc32(np.ascontiguousarray(value, dtype="<f4").tobytes(), zlib.crc32(name.encode(), total))
    return total


def write(
    name: str,
    directory: str | Path,
    *,
    spelling: Literal["v5", "v4", "early"] = "v5",
    dtype: Literal["float32", "bfloat16"] = "float32",
    files: int = 1,
    fused: bool = False,
) -> Path:
    """Write a case as a Hugging Face directory.

    Args:
        name: The case.
        directory: Where to; made if it does not exist.
        spelling: Which configuration becomes `config.json`: of transformers 5, of 4.57, or of the first 4.x releases.
        dtype: Of the tensors, and named in the configuration.
        files: More than one writes shards and `model.safetensors.index.json`.
        fused: Write the experts fused.

    Returns:
        The directory.
    """
    folder = Path(directory)
    config = _json(FAMILIES / name / ("config.json" if spelling == "v5" else "config_v4.json"))
    config = early(config) if spelling == "early" else config
    config["dtype" if spelling == "v5" else "torch_dtype"] = dtype
    return write_directory(folder, config, weights(name, fused=fused), dtype=dtype, files=files)


def write_directory(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
    files: int = 1,
) -> Path:
    """Write any configuration and tensors as a Hugging Face directory; arguments as for `write`."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    cast = {tensor: np.ascontiguousarray(value.astype(_dtype(dtype))) for tensor, value in tensors.items()}
    if files == 1:
        save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for index, names in enumerate(np.array_split(np.array(list(cast), dtype=object), files), start=1):
        file = f"model-{index:05d}-of-{files:05d}.safetensors"
        save_file({tensor: cast[tensor] for tensor in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    sizes = {
        "total_parameters": sum(value.size for value in cast.values()),
        "total_size": sum(value.nbytes for value in cast.values()),
    }
    index_json = json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(index_json + "\n")
    return folder


def early(config_v4: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of 4.57 as the first releases with that family wrote it: fewer keys, older names."""
    config = {key: value for key, value in config_v4.items() if key not in LATER}
    scaling = config.get("rope_scaling")
    if scaling is None:
        config.pop("rope_scaling", None)
    elif config["model_type"] == "llama" and scaling["rope_type"] != "llama3":
        config["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    if config.get("head_dim", 0) is None:
        del config["head_dim"]
    if config["model_type"] == "gpt_neox":  # rotary_pct and rotary_emb_base alone
        del config["partial_rotary_factor"], config["rope_theta"]
    if config["model_type"] == "gemma":  # meant the tanh form all the same
        del config["hidden_activation"]
        config["hidden_act"] = "gelu"
    return config


def _dtype(name: str) -> np.dtype:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
