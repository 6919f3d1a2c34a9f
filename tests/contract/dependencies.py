"""What waits for what in compiled HLO text: which products depend on which all-reduces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<rest>.*)$")
_KIND = re.compile(r"^(?:\(.*?\)|\S+) (?P<kind>[\w-]+)\(")  # behind the shape of the result, which may be a tuple
_NAME = re.compile(r"%([\w.-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: its operation, and all that it names, operands and called computations alike."""

    kind: str
    names: tuple[str, ...]
    channel: int


class Dependencies:
    """The instructions of the entry computation, and what each needs before it can run."""

    def __init__(self, hlo: str):
        """Read the text of a compiled program without loops."""
        computations, entry = _computations(hlo)
        products = {"dot"} | {name for name in computations if _holds_a_dot(computations, name)}
        self._entry, self._before = computations[entry], dict[str, frozenset[str]]()
        self.products = {
            name for name, one in self._entry.items() if one.kind == "dot" or products & {*one.names} - {*self._entry}
        }
        reduced = [name for name, one in self._entry.items() if one.kind.startswith("all-reduce")]
        self.all_reduces = sorted(reduced, key=lambda name: self._entry[name].channel)
        for name in self._entry:  # an instruction stands behind its operands
            operands = [other for other in self._entry[name].names if other in self._before]
            self._before[name] = frozenset(operands).union(*(self._before[other] for other in operands))

    def waits(self, name: str, other: str) -> bool:
        """Say whether there is a path from instruction `other` to `name`."""
        return other in self._before[name]

    def branches(self) -> list[set[str]]:
        """Return the products behind each all-reduce that are behind none of an earlier channel."""
        found, seen = [], set[str]()
        for name in self.all_reduces:
            found.append((self._before[name] & self.products) - seen)
            seen |= self._before[name]
        return found


def _computations(hlo: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    found: dict[str, dict[str, Instruction]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            current = head["name"]
            entry, found[current] = current if head["entry"] else entry, {}
        elif (match := _INSTRUCTION.match(line)) and (kind := _KIND.match(match["rest"])):
            channel = _CHANNEL.search(match["rest"])
            names = tuple(_NAME.findall(match["rest"]))
            found[current][match["name"]] = Instruction(kind["kind"], names, int(channel[1]) if channel else 0)
    return found, entry


def _holds_a_dot(computations: dict[str, dict[str, Instruction]], name: str) -> bool:
    return any(kind == "dot" for kind in _kinds(computations, name))


def _kinds(computations: dict[str, dict[str, Instruction]], name: str) -> Iterator[str]:
    """Yield the operations of a computation, and of those that it calls."""
    own = computations[name]
    for one in own.values():
        yield one.kind
        for called in one.names:
            if called in computations and called not in own:
                yield from _kinds(computations, called)
