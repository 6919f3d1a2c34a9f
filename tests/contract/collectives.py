"""Collectives in compiled HLO text, by kind and group size: what a scheme really sends."""

from __future__ import annotations

import math
import re
from collections import Counter

_OP = re.compile(
    r"= (?P<result>\(?[a-z0-9]+\[.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\((?P<rest>.*)"
)
_SHAPE = re.compile(r"[a-z]+[0-9]+\[([0-9,]*)\]")


def _group_size(rest: str) -> int:
    """Read the size of a replica group from any of the three notations."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(iota.group(2))
    if listed := re.search(r"replica_groups=\{\{([0-9,]+)\}", rest):
        return len(listed.group(1).split(","))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh.group(2)))
    return 0


def elements(hlo: str) -> Counter[tuple[str, int]]:
    """Add up the result elements of every collective, by (kind, group size). Loops count once."""
    found: Counter[tuple[str, int]] = Counter()
    for line in hlo.splitlines():
        if match := _OP.search(line):
            sizes = [math.prod(int(n) for n in dims.split(",") if n) for dims in _SHAPE.findall(match["result"])]
            found[match["kind"], _group_size(match["rest"])] += sum(sizes)
    return found
