"""What a kind of device can do, from its data sheet: products, memory, links.

Peaks are dense (no structured sparsity). A link's figure is what one device sends in one direction over all its links
together; vendors mostly print the sum of both directions, which is twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp.names import unknown

GIB = 2**30


@dataclass(frozen=True)
class DeviceKind:
    """The figures of one kind of device.

    Args:
        name: as on the command line.
        bf16_flops: peak of bfloat16 (and float16) products, per second.
        int8_flops: peak of int8 products, where weights and activations both are int8.
        memory_bytes: of the device's own memory.
        memory_bytes_per_s: read from it.
        link_bytes_per_s: sent to the other devices of the slice or node.
        latency_s: of one collective, however small.
    """

    name: str
    bf16_flops: float
    int8_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float

    def flops(self, dtype: str) -> float:
        """Return the peak of products of activations in this dtype.

        float32 counts as half of bfloat16: what a GPU does by default (TF32); fp32 that is exact is slower.
        """
        return self.bf16_flops / 2 if dtype == "float32" else self.bf16_flops


# No vendor prints the latency of a collective. 10 us is the order that the NCCL tests show for small messages inside a
# node, 2 us that of a ring of TPUs (about 1 us per hop: Austin et al., How to Scale Your Model, 2025, chapter 3).
_NODE, _PCIE, _TORUS = 10e-6, 20e-6, 2e-6

_KINDS = (
    # NVIDIA H200 datasheet (SXM): 989 TFLOPS bf16, 1979 TOPS int8, 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways
    DeviceKind("h200", 989e12, 1979e12, 141 * 10**9, 4.8e12, 450e9, _NODE),
    # NVIDIA H100 datasheet (SXM): 989 TFLOPS, 1979 TOPS, 80 GB, 3.35 TB/s, NVLink 900 GB/s
    DeviceKind("h100", 989e12, 1979e12, 80 * 10**9, 3.35e12, 450e9, _NODE),
    # NVIDIA A100 datasheet (80 GB SXM): 312 TFLOPS, 624 TOPS, 2039 GB/s, NVLink 600 GB/s
    DeviceKind("a100-80g", 312e12, 624e12, 80 * 10**9, 2.039e12, 300e9, _NODE),
    # NVIDIA L40S datasheet: 362 TFLOPS, 733 TOPS, 48 GB, 864 GB/s, PCIe 4 x16 64 GB/s both ways, no NVLink
    DeviceKind("l40s", 362e12, 733e12, 48 * 10**9, 864e9, 32e9, _PCIE),
    # NVIDIA L4 datasheet (half of its figures with sparsity): 121 TFLOPS, 242 TOPS, 24 GB, 300 GB/s, PCIe 4 x16
    DeviceKind("l4", 121e12, 242e12, 24 * 10**9, 300e9, 32e9, _PCIE),
    # NVIDIA HGX B200 datasheet, an eighth: 2.25 PFLOPS, 4.5 POPS, 180 GB, 8 TB/s, NVLink 1.8 TB/s both ways
    DeviceKind("b200", 2250e12, 4500e12, 180 * 10**9, 8e12, 900e9, _NODE),
    # Google Cloud, TPU v4: 275 TFLOPS bf16 and int8, 32 GiB, 1200 GB/s, 2400 Gbps
    DeviceKind("v4", 275e12, 275e12, 32 * GIB, 1.2e12, 300e9, _TORUS),
    # Google Cloud, TPU v5e: 197 TFLOPS, 393 TOPS, 16 GB, 819 GB/s, links 400 GB/s both ways
    DeviceKind("v5e", 197e12, 393e12, 16 * 10**9, 819e9, 200e9, _TORUS),
    # Google Cloud, TPU v5p: 459 TFLOPS, 918 TOPS, 95 GiB, 2765 GB/s, links 1200 GB/s both ways
    DeviceKind("v5p", 459e12, 918e12, 95 * GIB, 2.765e12, 600e9, _TORUS),
    # Google Cloud, TPU v6e (Trillium): 918 TFLOPS, 1836 TOPS, 32 GB, 1638 GB/s, links 800 GB/s both ways
    DeviceKind("v6e", 918e12, 1836e12, 32 * 10**9, 1.638e12, 400e9, _TORUS),
    # No data sheet: the order of eight cores of a server with two channels of memory, devices within one process
    DeviceKind("cpu", 0.5e12, 1e12, 16 * 10**9, 40e9, 10e9, 50e-6),
)

DEVICE_KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in _KINDS}

ALIASES = {"trillium": "v6e", "v5litepod": "v5e", "a100": "a100-80g"}


def device_kind(name: str) -> DeviceKind:
    """Find a kind of device by its name.

    Raises:
        ValueError: there is none; the nearest is named.

    Example:
        >>> device_kind("Trillium").name
        'v6e'
    """
    lower = name.strip().lower()
    known = ALIASES.get(lower, lower)
    if known not in DEVICE_KINDS:
        raise ValueError(unknown("unknown device", name, (*DEVICE_KINDS, *ALIASES)))
    return DEVICE_KINDS[known]
