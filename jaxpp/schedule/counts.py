"""Whether a schedule exists for the given numbers; if not, which numbers would do."""

from __future__ import annotations


def check_counts(name: str, **counts: int) -> None:
    """Refuse a count that is not 1 or more.

    Args:
        name: of the schedule, for the message.
        counts: by what they count, e.g. ``ranks=4``.

    Raises:
        ValueError: the first that is not a positive whole number.
    """
    for what, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"schedule {name}: {what} = {count!r}; a whole number of 1 or more is needed")


def check_multiple(name: str, what: str, count: int, unit: int, reason: str) -> None:
    """Refuse a count that is no multiple of `unit`, naming the nearest that are.

    Args:
        name: of the schedule.
        what: is counted.
        count: that was given.
        unit: whose multiples do.
        reason: what `unit` is, e.g. ``"ranks"``.

    Raises:
        ValueError: `count` is no multiple of `unit`.
    """
    if count % unit:
        below, above = count // unit * unit, (count // unit + 1) * unit
        fix = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"schedule {name}: {what} = {count} is no multiple of {reason} = {unit}; {fix} would do")


def check_least(name: str, what: str, count: int, least: int, reason: str) -> None:
    """Refuse a count below `least`.

    Args:
        name: of the schedule.
        what: is counted.
        count: that was given.
        least: that does.
        reason: where `least` comes from, e.g. ``"2 * ranks - 1"``.

    Raises:
        ValueError: `count` is less.
    """
    if count < least:
        raise ValueError(f"schedule {name}: {what} = {count}, {reason} = {least} or more are needed")
