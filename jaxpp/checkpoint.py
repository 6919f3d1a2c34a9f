"""Checkpoints: save a sharded state, restore it onto any other layout. The only door to orbax.

On disk::

    <directory>/<step>/state/        the arrays, in orbax's format, under the names of `jaxpp.tree.named_leaves`
    <directory>/<step>/config.yaml   and other small texts, readable with an editor
    <directory>/<step>/files.json    every file of the step and its size: written last, so it marks a finished save

A step is written under a temporary name and renamed when complete. Nothing on disk depends on the mesh that saved it.
Does not know what the arrays mean, when to save, or which step to prefer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxpp.tree import differences, fill, named_leaves

_STATE = "state"
_INVENTORY = "files.json"
_NOT_TEXTS = {_INVENTORY, "_CHECKPOINT_METADATA", "commit_success.txt"}
_TEMPORARY = ".orbax-checkpoint-tmp"
# Small chunks let a restore onto another layout read little more than its own slices, and keep what is in flight small.
_CHUNK_BYTES = 4 * 2**20
_IN_FLIGHT_BYTES = 32 * 2**20
_MAX_LINES = 8


def _from_elsewhere(record: logging.LogRecord) -> bool:
    # Whatever matters in orbax's log is also raised to the caller; the rest only hides the training log.
    return f"{os.sep}orbax{os.sep}" not in record.pathname


logging.getLogger("absl").addFilter(_from_elsewhere)


def _array_handler(largest_bytes: int) -> ocp.PyTreeCheckpointHandler:
    """Build orbax's reader and writer of arrays, with the bytes in flight bounded.

    Unbounded, orbax writes all arrays in one transaction, which holds the encoded checkpoint in memory; and its bound
    must exceed the largest single request.
    """
    limit = max(_IN_FLIGHT_BYTES, largest_bytes) + 1
    bounded = ocp.BasePyTreeCheckpointHandler(
        use_compression=False, save_concurrent_bytes=limit, restore_concurrent_bytes=limit
    )
    return ocp.PyTreeCheckpointHandler(handler_impl=bounded)


def _reason(error: BaseException) -> str:
    """Give the first cause of `error` in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _readable(target: epath.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OSError(f"checkpoint {target} was not saved: {_reason(error)}") from error


class _StepHandler(ocp.AsyncCheckpointHandler):
    """Writes the arrays and texts of one step into the directory that orbax gives and later renames."""

    async def async_save(
        self, directory: epath.Path, args: _StepSave
    ) -> list[ocp.future.Future] | None:
        state = directory / _STATE
        state.mkdir(exist_ok=True)
        if jax.process_index() == 0:
            for name, text in args.texts.items():
                (directory / name).write_text(text)
        shards = [s.data.nbytes for leaf in args.leaves.values() for s in leaf.addressable_shards]
        self._arrays = _array_handler(max(shards, default=0))
        chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in args.leaves}
        return await self._arrays.async_save(
            state, args=ocp.args.PyTreeSave(item=dict(args.leaves), save_args=chunks)
        )

    def finalize(self, directory: epath.Path) -> None:
        self._arrays.finalize(directory / _STATE)
        sizes = {k: v for k, v in _sizes(directory).items() if k not in _NOT_TEXTS}
        (directory / _INVENTORY).write_text(json.dumps(sizes, indent=1))

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("saving goes through async_save")

    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("restoring goes through Checkpoints.restore")


@ocp.args.register_with_handler(_StepHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _StepSave(ocp.args.CheckpointArgs):
    leaves: Mapping[str, jax.Array]
    texts: Mapping[str, str]


def _sizes(directory: epath.Path) -> dict[str, int]:
    """Map each file under `directory` to its size in bytes."""
    sizes = {}
    for path in directory.iterdir():
        if path.is_dir():
            sizes |= {f"{path.name}/{name}": size for name, size in _sizes(path).items()}
        else:
            sizes[path.name] = path.stat().length
    return sizes


def _faults(step_directory: epath.Path) -> list[str]:
    """List the files of a finished step that are missing or cut, as one readable phrase each."""
    try:
        expected = json.loads((step_directory / _INVENTORY).read_text())
    except (OSError, ValueError):
        return [f"{_INVENTORY} is missing or cut, so the save or a copy of it did not finish"]
    found = _sizes(step_directory)
    return [
        f"{name} is missing"
        if name not in found
        else f"{name} has {found[name]} bytes, needed {size}"
        for name, size in sorted(expected.items())
        if found.get(name) != size
    ]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix and name else prefix or name


def _listed(lines: list[str]) -> str:
    more = len(lines) - _MAX_LINES
    return "; ".join(lines[:_MAX_LINES]) + (f"; and {more} more" if more > 0 else "")


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """Replace a PRNG key array, or an abstract one, by its integer data; other leaves pass unchanged."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _like(data: jax.Array, leaf: Any) -> jax.Array:
    """Undo `_plain`: wrap `data` as keys of the kind of `leaf` if that is what it is."""
    if not _is_key(leaf):
        return data
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(data, impl=kinds[0])


def _request_bytes(entry: Any, sharding: jax.sharding.Sharding | None) -> int:
    """Bound the bytes that orbax reserves to read one shard: whole chunks, wherever the shard begins."""
    shard = sharding.shard_shape(entry.shape) if sharding else entry.shape
    num_bytes = np.dtype(entry.dtype).itemsize
    for size, part, chunk in zip(entry.shape, shard, entry.storage.chunk_shape, strict=True):
        num_bytes *= chunk * min(-(-size // chunk), -(-part // chunk) + 1)
    return num_bytes


class Checkpoints:
    """The checkpoints of one run: ``<directory>/<step>/``.

    With several processes all of them make the same calls, on a directory that all of them see.

    Args:
        directory: where the steps lie; made if missing.
        keep: how many of the newest finished steps to keep (at least 1). An older step is removed only after a newer
            one is complete.
        asynchronous: write in the background; `save` returns once the arrays may be overwritten or donated.
        writable: False to read only; `directory` must then exist.

    Raises:
        ValueError: the directory cannot be made or written, or `keep` is below 1.

    Example::

        with Checkpoints("runs/a/checkpoints") as checkpoints:
            checkpoints.save(10, state, {"config.yaml": text})
            state = checkpoints.restore(10, abstract_state)  # shape, dtype and sharding of each leaf
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
        name = os.fspath(directory)
        self.directory = epath.Path(name if "://" in name else os.path.abspath(name))
        self.keep, self.asynchronous = keep, asynchronous
        self._saving: tuple[int, ocp.AsyncCheckpointer] | None = None
        try:
            if writable:
                self.directory.mkdir(parents=True, exist_ok=True)
                probe = self.directory / f".write-test-{os.getpid()}"
                probe.write_text("")
                probe.unlink()
            elif not self.directory.is_dir():
                raise NotADirectoryError("no such directory")
        except OSError as error:
            use = "write" if writable else "read"
            raise ValueError(
                f"cannot {use} checkpoints in {self.directory}: {error.strerror or error}; "
                f"give a directory that this user can {use}"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

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
        """Save `state` and `texts` as `step`, all or nothing.

        Waits for the previous save. When it returns, the buffers of `state` may be donated or overwritten.

        Args:
            step: number of updates done.
            state: any pytree of ``jax.Array`` (PRNG keys too), sharded in any way.
            texts: file name to content, e.g. ``{"config.yaml": ..., "data.json": ...}``.
            overwrite: replace the step if it exists; the old one is removed before the new one is complete.

        Raises:
            ValueError: the step exists, a leaf is no ``jax.Array``, or a text's name is not a plain file name.
            OSError: the previous save failed (disk full, directory gone).

        Cost: host memory: one copy of this process's shards (none on CPU, where donation copies instead until the save
        is done), and at most 32 MiB or one shard in flight to the disk.
        """
        self.wait()
        leaves = named_leaves(state)
        _check_savable(leaves, texts or {})
        target = self.directory / str(step)
        if step in self.steps() and not overwrite:
            raise ValueError(
                f"checkpoint {target} exists already; pass overwrite=True or another step"
            )
        if jax.process_index() == 0 and target.exists():
            target.rmtree()
        arguments = _StepSave({name: _plain(leaf) for name, leaf in leaves.items()}, texts or {})
        # One writer a save: orbax's keeps its copy of the state until its next save.
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        writer = ocp.AsyncCheckpointer(_StepHandler(), async_options=options)
        self._saving = step, writer
        with _readable(target):
            writer.save(target, args=arguments)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Block until the save in progress is complete, then remove the steps beyond `keep`.

        Raises:
            OSError: that save failed; earlier steps are untouched.
        """
        if self._saving is None:
            return
        (step, writer), self._saving = self._saving, None
        with _readable(self.directory / str(step)):
            writer.close()
        if jax.process_index() == 0:
            self._remove_old(step)

    def _remove_old(self, saved: int) -> None:
        for step in self.steps()[: -self.keep]:
            if step != saved:
                self.remove(step)
        for name in self.incomplete():
            step = name.removesuffix(_TEMPORARY)
            if step != name and step.isdigit() and int(step) <= saved:
                (self.directory / name).rmtree()

    def remove(self, step: int) -> None:
        """Remove one step, e.g. those newer than the step that training restarts from."""
        directory = self.directory / str(step)
        # Unmarked first: if this is interrupted, what is left does not count as a checkpoint.
        (directory / _INVENTORY).unlink(missing_ok=True)
        directory.rmtree()

    def close(self) -> None:
        """Wait for the save in progress."""
        self.wait()

    def _is_complete(self, path: epath.Path) -> bool:
        return (path / _INVENTORY).exists() and ocp.step.is_path_finalized(path)

    def steps(self) -> list[int]:
        """List the steps whose save was completed, oldest first."""
        if not self.directory.is_dir():
            return []
        paths = [path for path in self.directory.iterdir() if path.name.isdigit()]
        return sorted(int(path.name) for path in paths if self._is_complete(path))

    def latest(self) -> int | None:
        """Return the newest complete step, None if there is none."""
        return max(self.steps(), default=None)

    def incomplete(self) -> list[str]:
        """Name the directories that a killed save or a partial copy left; they are never restored."""
        if not self.directory.is_dir():
            return []
        return sorted(
            path.name
            for path in self.directory.iterdir()
            if path.name.removesuffix(_TEMPORARY).isdigit() and not self._is_complete(path)
        )

    def texts(self, step: int) -> dict[str, str]:
        """Return the texts saved with `step`, by file name."""
        directory = self._find(step)
        paths = [p for p in directory.iterdir() if not p.is_dir() and p.name not in _NOT_TEXTS]
        return {path.name: path.read_text() for path in sorted(paths)}

    def contents(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return name, shape and dtype of every array of `step`, from metadata alone: on any machine, no mesh needed.

        PRNG keys appear as the integers they are stored as.
        """
        entries = self._entries(self._find(step))
        return {k: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for k, v in entries.items()}

    def restore(self, step: int, like: Any, *, prefix: str = "") -> Any:
        """Restore `step` onto the shardings of `like`, to the bits that were saved.

        Waits for a save in progress. Each device receives its own slices only; no array is ever whole on one device
        or host unless its sharding says so.

        Args:
            step: a complete step.
            like: pytree of ``jax.ShapeDtypeStruct`` with ``sharding``, on any mesh, devices and processes.
            prefix: restore the subtree under this name only, e.g. ``"params"``; `like` is then that subtree.

        Returns:
            The structure of `like` with ``jax.Array`` leaves on exactly its shardings.

        Raises:
            ValueError: no such step; names, shapes or dtypes differ (they are listed); files are missing or cut.

        Cost: host memory: this process's shards, and about 32 MiB or one shard's chunks in flight.
        """
        targets = {_join(prefix, name): leaf for name, leaf in named_leaves(like).items()}
        wanted = {name: _plain(leaf) for name, leaf in targets.items()}
        loose = [name for name, leaf in wanted.items() if getattr(leaf, "sharding", None) is None]
        if loose:
            raise ValueError(
                f"no sharding given for {_listed(loose)}; set sharding= on each ShapeDtypeStruct"
            )
        directory = self._find(step)
        entries = self._under(prefix, self._entries(directory), directory)
        lines = differences(entries, wanted)
        if lines:
            raise ValueError(
                f"checkpoint {directory} does not fit: {len(lines)} differences: {_listed(lines)}"
            )
        arguments = {
            name: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                sharding=leaf.sharding,
                global_shape=leaf.shape,
                dtype=leaf.dtype,
            )
            for name, leaf in wanted.items()
        }
        arrays = self._read(directory, entries, arguments)
        leaves = {
            name: _like(arrays[_join(prefix, name)], leaf)
            for name, leaf in named_leaves(like).items()
        }
        return fill(like, leaves)

    def restore_numpy(self, step: int, prefix: str = "") -> dict[str, np.ndarray]:
        """Return every array of `step` under `prefix`, whole, by its full name: no mesh, no template."""
        directory = self._find(step)
        entries = self._under(prefix, self._entries(directory), directory)
        return self._read(
            directory, entries, {k: ocp.RestoreArgs(restore_type=np.ndarray) for k in entries}
        )

    def _find(self, step: int) -> epath.Path:
        """Return the directory of a complete and undamaged step."""
        self.wait()
        directory = self.directory / str(step)
        if not directory.exists():
            have = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"no checkpoint {directory}; complete steps there: {have}")
        if faults := _faults(directory):
            raise self._damaged(directory, _listed(faults))
        return directory

    def _damaged(self, directory: epath.Path, reason: str) -> ValueError:
        older = [
            s
            for s in self.steps()
            if s < int(directory.name) and not _faults(self.directory / str(s))
        ]
        advice = (
            f"checkpoint.step={older[-1]} restores the one before it"
            if older
            else "no older step is intact"
        )
        return ValueError(f"checkpoint {directory} is damaged: {reason}; {advice}")

    def _entries(self, directory: epath.Path) -> dict[str, Any]:
        try:
            return dict(_array_handler(0).metadata(directory / _STATE).tree)
        except Exception as error:
            raise self._damaged(directory, _reason(error)) from error

    def _under(self, prefix: str, entries: dict[str, Any], directory: epath.Path) -> dict[str, Any]:
        chosen = {
            k: v
            for k, v in entries.items()
            if not prefix or k == prefix or k.startswith(f"{prefix}/")
        }
        if prefix and not chosen:
            have = ", ".join(sorted({name.split("/")[0] for name in entries}))
            raise ValueError(f"checkpoint {directory} has nothing under {prefix!r}; it has {have}")
        return chosen

    def _read(
        self,
        directory: epath.Path,
        entries: Mapping[str, Any],
        arguments: Mapping[str, ocp.RestoreArgs],
    ) -> dict[str, Any]:
        requests = [
            _request_bytes(entries[k], getattr(v, "sharding", None)) for k, v in arguments.items()
        ]
        item = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in entries.items()}
        restore = ocp.args.PyTreeRestore(
            item=item, restore_args=dict(arguments), partial_restore=True
        )
        try:
            return _array_handler(max(requests, default=0)).restore(
                directory / _STATE, args=restore
            )
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            raise self._damaged(directory, _reason(error)) from error


def _check_savable(leaves: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    if not leaves:
        raise ValueError("nothing to save: the state holds no arrays")
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"{name} is a {type(leaf).__name__}, needed a jax.Array: jnp.asarray makes one"
            )
    for name in texts:
        if name in {*_NOT_TEXTS, _STATE} or name != os.path.basename(name) or not name.strip("."):
            raise ValueError(f"text name {name!r}: needed a plain file name such as config.yaml")
