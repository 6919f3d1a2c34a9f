"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re

UNITS = {
    "b": 1, "": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    Raises:
        ValueError: it is none, or not positive.

    Example:
        >>> parse_bytes("4GiB"), parse_bytes("1.5 kB"), parse_bytes("512")
        (4294967296, 1500, 512)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match[2].lower() if match else None
    if match is None or unit not in UNITS or not (num_bytes := int(float(match[1]) * UNITS[unit])):
        raise ValueError(f'"{text}" is no number of bytes; write e.g. 4GiB, 500MiB or 4GB')
    return num_bytes


def show_bytes(num_bytes: float) -> str:
    """Write a number of bytes with three digits.

    Example:
        >>> show_bytes(1536), show_bytes(3 * 2**30), show_bytes(12)
        ('1.50 KiB', '3.00 GiB', '12 B')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 1000 or unit == "TiB":
            break
    return f"{num_bytes:.{2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0}f} {unit}"


def show_time(time: float, unit: str = "s") -> str:
    """Write a time: with a unit of its own where it is in seconds, as a plain number where it has none.

    Args:
        time: to be written.
        unit: ``s``, or nothing where times are in units of one operation.

    Example:
        >>> show_time(0.01234), show_time(28.5, ""), show_time(33.0, ""), show_time(2.5e-5)
        ('12.3 ms', '28.5', '33', '25 us')
    """
    if unit != "s":
        return f"{time:.4g} {unit}".strip()
    for factor, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if time >= factor or name == "us" or not time:
            return f"{time / factor:.3g} {name}" if time else "0 s"
    raise AssertionError("microseconds take any time")


def show_share(ratio: float) -> str:
    """Write a ratio in percent.

    Example:
        >>> show_share(0.2727), show_share(0.0)
        ('27.3 %', '0.0 %')
    """
    return f"{100 * ratio:.1f} %"
