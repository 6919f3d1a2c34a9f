"""The directory of a run's checkpoints: complete steps, damaged steps, and the texts they hold.

A step is complete when it holds ``files.json``, the sizes of all its files, which is written last.
Works on any path that `etils.epath` knows (local disks, ``gs://``). Does not know arrays: that is
`jaxpp.checkpoint`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping

from etils import epath

STATE = "state"
_INVENTORY = "files.json"
_COMMITTED = "commit_success.txt"
_NOT_TEXTS = {_INVENTORY, _COMMITTED, "_CHECKPOINT_METADATA"}
_TEMPORARY = ".orbax-checkpoint-tmp"
_MAX_LINES = 8


def usable(directory: str | os.PathLike[str], *, writable: bool) -> epath.Path:
    """Return the absolute path of `directory`, made if `writable`, once it is known to be usable.

    Raises:
        ValueError: it cannot be made, written or read.
    """
    name = os.fspath(directory)
    path = epath.Path(name if "://" in name else os.path.abspath(name))
    try:
        if writable:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".write-test-{os.getpid()}"
            probe.write_text("")
            probe.unlink()
        elif not path.is_dir():
            raise NotADirectoryError("no such directory")
    except OSError as error:
        use = "write" if writable else "read"
        raise ValueError(
            f"cannot {use} checkpoints in {path}: {error.strerror or error}; give a directory that this user can {use}"
        ) from error
    return path


def write_inventory(step_directory: epath.Path) -> None:
    """Mark a step as complete: list its files with their sizes."""
    sizes = _sizes(step_directory)
    kept = {name: size for name, size in sizes.items() if name not in _NOT_TEXTS}
    (step_directory / _INVENTORY).write_text(json.dumps(kept, indent=1))


def _sizes(directory: epath.Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path in directory.iterdir():
        if path.is_dir():
            sizes |= {f"{path.name}/{name}": size for name, size in _sizes(path).items()}
        else:
            sizes[path.name] = path.stat().length
    return sizes


def faults(step_directory: epath.Path) -> list[str]:
    """List, a phrase each, the files of a step that are missing or cut; empty if it is intact."""
    try:
        expected = json.loads((step_directory / _INVENTORY).read_text())
    except (OSError, ValueError):
        return [f"{_INVENTORY} is missing or cut: the save, or a copy of it, did not finish"]
    found = _sizes(step_directory)
    return [
        f"{name} has {found[name]} bytes, needed {size}" if name in found else f"{name} is missing"
        for name, size in sorted(expected.items())
        if found.get(name) != size
    ]


def intact(directory: epath.Path, step: int) -> epath.Path:
    """Return the directory of `step`.

    Raises:
        ValueError: there is no such step, or files of it are missing or cut.
    """
    path = directory / str(step)
    if not path.exists():
        have = ", ".join(map(str, complete_steps(directory))) or "none"
        raise ValueError(f"no checkpoint {path}; complete steps there: {have}")
    if found := faults(path):
        raise damaged(path, listed(found))
    return path


def damaged(step_directory: epath.Path, reason: str) -> ValueError:
    """Build the error for a step that cannot be read; it names the newest older one that can."""
    directory, step = step_directory.parent, int(step_directory.name)
    older = [s for s in complete_steps(directory) if s < step and not faults(directory / str(s))]
    advice = "no older step is intact"
    if older:
        advice = f"checkpoint.step={older[-1]} restores the newest intact step before it"
    return ValueError(f"checkpoint {step_directory} is damaged: {reason}; {advice}")


def listed(lines: list[str]) -> str:
    """Join the first few `lines` and count the rest."""
    more = len(lines) - _MAX_LINES
    return "; ".join(lines[:_MAX_LINES]) + (f"; and {more} more" if more > 0 else "")


def first_cause(error: BaseException) -> str:
    """Give the first cause of `error` in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def saving(step_directory: epath.Path) -> Iterator[None]:
    """Turn whatever fails while a step is being saved into one line.

    Raises:
        OSError: naming the step and the first cause.
    """
    try:
        yield
    except Exception as error:
        cause = first_cause(error)
        raise OSError(f"checkpoint {step_directory} was not saved: {cause}") from error


def _is_complete(path: epath.Path) -> bool:
    # A bucket cannot rename a directory, so there a step has its final name before it is committed.
    needed = [_INVENTORY, _COMMITTED] if "://" in str(path) else [_INVENTORY]
    return all((path / name).exists() for name in needed)


def complete_steps(directory: epath.Path) -> list[int]:
    """List the steps whose save was completed, oldest first."""
    paths = [path for path in directory.iterdir() if path.name.isdigit()]
    return sorted(int(path.name) for path in paths if _is_complete(path))


def incomplete(directory: epath.Path) -> list[str]:
    """Name the directories that a killed save or a partial copy left."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name.removesuffix(_TEMPORARY).isdigit() and not _is_complete(path)
    )


def remove(step_directory: epath.Path) -> None:
    """Remove a step; if interrupted, what is left does not count as a checkpoint."""
    (step_directory / _INVENTORY).unlink(missing_ok=True)
    step_directory.rmtree()


def set_aside(directory: epath.Path, step: int) -> epath.Path | None:
    """Move the steps newer than `step` into a new directory ``aside-N/``; None if there is none."""
    newer = [one for one in complete_steps(directory) if one > step]
    if not newer:
        return None
    number = next(n for n in itertools.count(1) if not (directory / f"aside-{n}").exists())
    aside = directory / f"aside-{number}"
    aside.mkdir()
    for one in newer:
        (directory / str(one)).rename(aside / str(one))
    return aside


def remove_old(directory: epath.Path, keep: int, saved: int) -> None:
    """Remove all but the newest `keep` steps and `saved`, and what killed saves left up to `saved`.

    A partial directory without the temporary name is not ours (a copy in progress, say): it stays.
    """
    for step in complete_steps(directory)[:-keep]:
        if step != saved:
            remove(directory / str(step))
    for name in incomplete(directory):
        step = name.removesuffix(_TEMPORARY)
        if step != name and int(step) <= saved:
            (directory / name).rmtree()


def check_text_names(texts: Mapping[str, str]) -> None:
    """Refuse names of texts that are not plain file names, or that are taken.

    Raises:
        ValueError: naming the first such name.
    """
    for name in texts:
        if name in {*_NOT_TEXTS, STATE} or name != os.path.basename(name) or not name.strip("."):
            raise ValueError(f"text {name!r}: needed a plain file name such as config.yaml")


def read_texts(step_directory: epath.Path) -> dict[str, str]:
    """Return the texts of a step by file name."""
    paths = [path for path in step_directory.iterdir() if not path.is_dir()]
    return {p.name: p.read_text() for p in sorted(paths) if p.name not in _NOT_TEXTS}
