"""What to say of a name that is not known: the nearest one, and all there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, name: str, known: Iterable[str], listed: str = "known") -> str:
    """Write the message for an unknown name.

    Args:
        what: the setting or kind, e.g. ``"plan.remat: unknown policy"``.
        name: what was given.
        known: the names there are, in the order to show them.
        listed: the word before the list.

    Example:
        >>> unknown("unknown fruit", "aple", ["apple", "pear"])
        'unknown fruit "aple"; did you mean "apple"? known: apple pear'
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return f'{what} "{name}"; {hint}{listed}: {" ".join(names)}'
