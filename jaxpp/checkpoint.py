"""Checkpoints: save a sharded state, restore it onto any other layout. The only door to orbax.

On disk::

    <directory>/<step>/state/       the arrays in orbax's format, named by `jaxpp.tree.named_leaves`
    <directory>/<step>/config.yaml  and other small texts, readable with an editor
    <directory>/<step>/files.json   every file and its size: marks a finished save

A step is written under a temporary name and renamed when complete. Nothing on disk depends on the
mesh that saved it. Does not know what the arrays mean, when to save, or which step to prefer.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxpp import checkpoint_files as files
from jaxpp import checkpoint_leaves as leaves
from jaxpp.tree import differences

# Small chunks let a restore onto another layout read little more than its own slices.
_CHUNK_BYTES = 4 * 2**20
_IN_FLIGHT_BYTES = 32 * 2**20


def _from_elsewhere(record: logging.LogRecord) -> bool:
    # What matters in orbax's log is also raised to the caller; the rest would hide the run's.
    return f"{os.sep}orbax{os.sep}" not in record.pathname


logging.getLogger("absl").addFilter(_from_elsewhere)


def _array_handler(largest_bytes: int) -> ocp.PyTreeCheckpointHandler:
    """Build orbax's reader and writer of arrays, with bounded bytes in flight.

    Unbounded, orbax writes everything in one transaction that holds the encoded arrays in memory.
    Its bound must exceed the largest request. Compression costs twice the time and a fifth more
    memory, and gains little on weights.
    """
    limit = max(_IN_FLIGHT_BYTES, largest_bytes) + 1
    bounded = ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=limit, restore_concurrent_bytes=limit, use_compression=False
    )
    return ocp.PyTreeCheckpointHandler(handler_impl=bounded)


class _StepHandler(ocp.AsyncCheckpointHandler):
    """Writes one step into the directory that orbax gives, and later renames."""

    async def async_save(self, directory: epath.Path, args: _StepSave) -> Any:
        state = directory / files.STATE
        state.mkdir(exist_ok=True)
        if jax.process_index() == 0:
            for name, text in args.texts.items():
                (directory / name).write_text(text)
        shards = [s.data.nbytes for leaf in args.leaves.values() for s in leaf.addressable_shards]
        self._arrays = _array_handler(max(shards, default=0))
        chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in args.leaves}
        item = ocp.args.PyTreeSave(item=dict(args.leaves), save_args=chunks)
        return await self._arrays.async_save(state, args=item)

    def finalize(self, directory: epath.Path) -> None:
        self._arrays.finalize(directory / files.STATE)
        files.write_inventory(directory)

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("saving goes through async_save")

    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("restoring goes through Checkpoints.restore")


@ocp.args.register_with_handler(_StepHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _StepSave(ocp.args.CheckpointArgs):
    leaves: Mapping[str, jax.Array]
    texts: Mapping[str, str]


def _return_freed_memory() -> None:
    # glibc keeps what is freed in blocks below 32 MiB, here up to a whole state after each save.
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run: ``<directory>/<step>/``.

    With several processes all make the same calls, on a directory that all of them see.

    Args:
        directory: where the steps lie; made if missing.
        keep: how many of the newest complete steps to keep, at least 1; an older one is
            removed only when a newer one is complete.
        asynchronous: write in the background; `save` returns once the state may be donated.
        writable: False to only read; `directory` must then exist.

    Raises:
        ValueError: the directory cannot be made, written or read, or `keep` is below 1.

    Example::

        with Checkpoints("runs/a/checkpoints") as checkpoints:
            checkpoints.save(10, state, {"config.yaml": text})
            state = checkpoints.restore(10, abstract_state)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        asynchronous: bool = True,
        writable: bool = True,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} checkpoints: at least 1 is needed")
        self.directory = files.usable(directory, writable=writable)
        self.keep, self.asynchronous = keep, asynchronous
        self._running: tuple[int, ocp.AsyncCheckpointer] | None = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: Any,
        texts: Mapping[str, str] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Save `state` and `texts` as `step`, all or nothing; waits for the previous save.

        Args:
            step: number of updates done.
            state: any pytree of ``jax.Array`` (PRNG keys too), sharded in any way; may be donated
                once this returns.
            texts: content by file name, e.g. ``{"config.yaml": ..., "data.json": ...}``.
            overwrite: replace the step if it exists; the old one is removed first.

        Raises:
            ValueError: the step exists, a leaf is no ``jax.Array``, or a text's name is unusable.
            OSError: this or the previous save failed (disk full, directory gone).

        Cost: host memory: one copy of this process's shards until the save is done (on CPU only if
            they are donated); in flight to the disk, 32 MiB or one shard.
        """
        self.wait()
        texts, arrays = texts or {}, leaves.named_arrays(state)
        leaves.check(arrays)
        files.check_text_names(texts)
        target = self.directory / str(step)
        if step in self.steps() and not overwrite:
            raise ValueError(f"checkpoint {target} exists already: overwrite=True replaces it")
        if jax.process_index() == 0 and target.exists():
            files.remove(target)
        stored = {name: leaves.as_stored(leaf) for name, leaf in arrays.items()}
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        # One writer a save: orbax's keeps its copy of the state until its own next save.
        writer = ocp.AsyncCheckpointer(_StepHandler(), async_options=options)
        with files.saving(target):
            writer.save(target, args=_StepSave(stored, texts))
        self._running = step, writer
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Block until the save in progress is complete, then remove the steps beyond `keep`.

        Raises:
            OSError: that save failed; earlier steps are untouched.
        """
        if self._running is None:
            return
        (step, writer), self._running = self._running, None
        with files.saving(self.directory / str(step)):
            writer.close()
        del writer
        _return_freed_memory()
        if jax.process_index() == 0:
            files.remove_old(self.directory, self.keep, saved=step)

    close = wait

    def set_aside(self, step: int) -> epath.Path | None:
        """Move the steps newer than `step`, if any, to ``aside-N/`` beside them, where they no longer count.

        Returns:
            Where they lie; only the first process moves them.
        """
        self.wait()
        return files.set_aside(self.directory, step) if jax.process_index() == 0 else None

    def steps(self) -> list[int]:
        """List the steps whose save was completed, oldest first."""
        return files.complete_steps(self.directory)

    def latest(self) -> int | None:
        """Return the newest complete step, None if there is none."""
        return max(self.steps(), default=None)

    def incomplete(self) -> list[str]:
        """Name the directories that a killed save or a partial copy left; never restored."""
        return files.incomplete(self.directory)

    def texts(self, step: int) -> dict[str, str]:
        """Return the texts saved with `step`, by file name."""
        return files.read_texts(self._opened(step))

    def contents(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every array of `step`, from metadata alone: needs no mesh.

        PRNG keys appear as the integers they are stored as.
        """
        entries = self._entries(self._opened(step), "")
        return {k: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for k, v in entries.items()}

    def restore(self, step: int, like: Any, *, prefix: str = "", partial: bool = False) -> Any:
        """Restore `step` onto the shardings of `like`, to the bits that were saved.

        Waits for a save in progress. Each device gets its own slices: no array is ever whole on one
        device or host unless its sharding says so.

        Args:
            step: a complete step.
            like: pytree of ``jax.ShapeDtypeStruct`` with ``sharding``, on any mesh and processes.
            prefix: restore only the subtree of this name, e.g. ``"params"``; `like` is that one.
            partial: `like` may lack some of the arrays.

        Returns:
            The structure of `like` with ``jax.Array`` leaves on exactly its shardings.

        Raises:
            ValueError: no such step; names, shapes or dtypes differ; files are missing or cut.

        Cost: host memory: this process's shards; in flight, 32 MiB or one shard's chunks.
        """
        targets = leaves.named_arrays(like, prefix)
        wanted = {name: leaves.as_stored(leaf) for name, leaf in targets.items()}
        leaves.check_shardings(wanted)
        directory = self._opened(step)
        entries = self._fitting(directory, wanted, prefix, partial)
        arrays = self._read(directory, entries, ocp.checkpoint_utils.construct_restore_args(wanted))
        restored = [leaves.as_wanted(arrays[name], leaf) for name, leaf in targets.items()]
        return jax.tree.unflatten(jax.tree.structure(like), restored)

    def check(self, step: int, like: Any, *, prefix: str = "") -> None:
        """Refuse, from metadata alone, a step that `restore` could not put into `like`.

        Raises:
            ValueError: no such step; names, shapes or dtypes differ; files are missing or cut.
        """
        wanted = {name: leaves.as_stored(leaf) for name, leaf in leaves.named_arrays(like, prefix).items()}
        self._fitting(self._opened(step), wanted, prefix)

    def restore_numpy(self, step: int, prefix: str = "") -> dict[str, np.ndarray]:
        """Return every array of `step` under `prefix`, whole, by its full name."""
        directory = self._opened(step)
        entries = self._entries(directory, prefix)
        arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in entries}
        return self._read(directory, entries, arguments)

    def _opened(self, step: int) -> epath.Path:
        self.wait()
        return files.intact(self.directory, step)

    def _fitting(
        self, directory: epath.Path, wanted: Mapping[str, Any], prefix: str, partial: bool = False
    ) -> dict[str, Any]:
        entries = self._entries(directory, prefix)
        if partial:
            entries = {name: entry for name, entry in entries.items() if name in wanted}
        if lines := differences(entries, wanted):
            count = f"{len(lines)} differences: {files.listed(lines)}"
            raise ValueError(f"checkpoint {directory} does not fit, {count}")
        return entries

    def _entries(self, directory: epath.Path, prefix: str) -> dict[str, Any]:
        """Read the metadata of the arrays under `prefix`, by name."""
        try:
            entries = dict(_array_handler(0).metadata(directory / files.STATE).tree)
        except Exception as error:
            raise files.damaged(directory, files.first_cause(error)) from error
        chosen = {k: v for k, v in entries.items() if leaves.is_under(prefix, k)}
        if not chosen:
            have = ", ".join(sorted({name.split("/")[0] for name in entries}))
            raise ValueError(f"checkpoint {directory} has nothing under {prefix!r}; it has {have}")
        return chosen

    def _read(
        self,
        directory: epath.Path,
        entries: Mapping[str, Any],
        arguments: Mapping[str, ocp.RestoreArgs],
    ) -> dict[str, Any]:
        largest = leaves.largest_request(entries, arguments)
        restore = ocp.args.PyTreeRestore(
            item={k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in entries.items()},
            restore_args=dict(arguments),
            partial_restore=True,
        )
        try:
            return _array_handler(largest).restore(directory / files.STATE, args=restore)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            raise files.damaged(directory, files.first_cause(error)) from error
