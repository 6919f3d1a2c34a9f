"""Checkpoints of any format, opened without their weights: a Hugging Face directory or name, a GGUF file, one of ours.

`open_checkpoint` tells the format; what it returns knows the model's config, its documents and tokenizer, and puts its
weights onto any layout. Everything that can be wrong is refused before a weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp import runs, tree
from jaxpp.checkpoint import Checkpoints
from jaxpp.convert.gguf import is_gguf, open_gguf
from jaxpp.convert.hub import find_on_hub, is_hub_name
from jaxpp.convert.places import check, weights
from jaxpp.convert.safetensors import open_safetensors
from jaxpp.convert.stream import load_onto
from jaxpp.convert.tensors import RenamedFiles, TensorFiles
from jaxpp.data import Tokenizer
from jaxpp.data.published import KEPT_CONFIG, texts, texts_of, tokenizer_of
from jaxpp.filling import read_filled
from jaxpp.model import ModelConfig
from jaxpp.models import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.published import read_config
from jaxpp.models.tie import settle_head

CONFIG = "config.json"

Progress = Callable[[int], None]


class Checkpoint(Protocol):
    """A checkpoint, opened: everything but its weights."""

    @property
    def name(self) -> str:
        """What the user called it."""
        ...

    @property
    def format(self) -> str:
        """``hf``, ``gguf`` or ``orbax``."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how it was read."""
        ...

    @property
    def texts(self) -> Mapping[str, str]:
        """The small documents that travel with the weights, by file name; `KEPT_CONFIG` is the original config."""
        ...

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """The stored dtype of each weight, by path."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer; None where it has none."""
        ...

    def read(self, like: Any, progress: Progress | None = None) -> Any:
        """Read weights onto the shardings and into the dtypes of `like`.

        Args:
            like: abstract ``nnx.State`` of all Params, or path to Param for some. Its tables may have more rows than
                the checkpoint's; these are zero.
            progress: called with the bytes read since the last call.
        """
        ...


@dataclass(frozen=True, eq=False)
class Published:
    """A checkpoint in files of the world: safetensors or GGUF, under the names of a family.

    Args:
        name: what the user called it.
        format: ``hf`` or ``gguf``.
        family: whose names its tensors bear.
        config: ours.
        files: its tensors.
        texts: the documents beside them.
        notes: what was decided while it was opened.
        ignored: patterns of tensors that are not read.
        own_tokenizer: one that does not come from `texts`.
    """

    name: str
    format: str
    family: Family
    config: DecoderConfig
    files: TensorFiles
    texts: Mapping[str, str]
    notes: tuple[str, ...]
    ignored: tuple[str, ...]
    own_tokenizer: Tokenizer | None = None

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """The stored dtype of each weight, by path."""
        return self._dtypes

    @cached_property
    def _dtypes(self) -> Mapping[str, np.dtype]:
        infos = self.files.names()
        chosen = weights(self.family.tensors(self.config), abstract_params(self.config), infos)
        return {weight.path: infos[next(iter(weight.tensors()))[0]].dtype for weight in chosen}

    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer; None where it has none."""
        return self.own_tokenizer or _tokenizer(self.name, self.texts)

    def read(self, like: Any, progress: Progress | None = None) -> Any:
        """Read the weights; see `Checkpoint.read`."""
        wanted, parts = tree.named_nodes(like), self.family.tensors(self.config)
        some = {path: forms for path, forms in parts.items() if path in wanted}
        ignored = self.ignored if len(some) == len(parts) else (r"",)  # the rest was checked when it was opened

        def read(like: Any) -> Any:
            return load_onto(self.files, some, like, ignored=ignored, progress=progress)

        return read_filled(read, like, self.config.table_rows)


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint of ours.

    Args:
        name: what the user called it.
        source: where it lies.
        config: of its model.
        texts: the documents beside the arrays.
    """

    name: str
    source: runs.Source
    config: ModelConfig
    texts: Mapping[str, str]
    format: str = "orbax"
    notes: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Checkpoints:
        """The directory of its steps, to be read."""
        return Checkpoints(self.source.directory, writable=False)

    @cached_property
    def _contents(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        found = self.checkpoints.contents(self.source.step)
        return {path.removeprefix("params/"): leaf for path, leaf in found.items() if path.startswith("params/")}

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """The stored dtype of each weight, by path."""
        return {path: np.dtype(leaf.dtype) for path, leaf in self._contents.items()}

    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer; None where it has none."""
        return _tokenizer(self.name, self.texts)

    def read(self, like: Any, progress: Progress | None = None) -> Any:
        """Read the weights; see `Checkpoint.read`. Progress comes in one piece."""

        def read(like: Any) -> Any:
            some = len(tree.named_nodes(like)) < len(self.dtypes)
            stored = _cast(like, self.dtypes)
            found = self.checkpoints.restore(self.source.step, stored, prefix="params", partial=some)
            return jax.tree.map(lambda x, wanted: x.astype(wanted.dtype), found, like)

        rows = self.config.table_rows if isinstance(self.config, DecoderConfig) else self.config.vocab_size
        found = read_filled(read, like, rows)
        if progress:
            paths = tree.named_nodes(like)
            progress(sum(tree.num_bytes(leaf) for path, leaf in self._contents.items() if path in paths))
        return found


def _tokenizer(name: str, documents: Mapping[str, str]) -> Tokenizer | None:
    try:
        return tokenizer_of(documents)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _cast(like: Any, dtypes: Mapping[str, np.dtype]) -> Any:
    def one(path: str, node: Any) -> Any:
        return jax.ShapeDtypeStruct(node.shape, dtypes.get(path, node.dtype), sharding=node.get_value().sharding)

    return tree.map_named(one, like)


def abstract_params(config: ModelConfig) -> Any:
    """Return the weights of a model as ``jax.ShapeDtypeStruct``, without shardings."""
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)[1]


def stored_bytes(checkpoint: Checkpoint, dtype: str = "") -> int:
    """Count the bytes of a checkpoint's weights, as they are stored or all in another dtype."""
    nodes, other = tree.named_nodes(abstract_params(checkpoint.config)), jnp.dtype(dtype) if dtype else None
    return sum(math.prod(nodes[path].shape) * (other or stored).itemsize for path, stored in checkpoint.dtypes.items())


def open_checkpoint(name: str | Path, accept: Collection[str] = ()) -> Checkpoint:
    """Open a checkpoint of any format; no weight is read.

    Args:
        name: a Hugging Face directory, a ``.safetensors`` file beside its ``config.json``, a name on the Hub
            (``"org/model"``), a GGUF file, a directory of ours (a run, its ``checkpoints/``, one step).
        accept: attributes of a ``config.json`` that may stay unread.

    Raises:
        ValueError: there is nothing of the kind, or it cannot be read exactly: says what and how to mend it.
    """
    path = Path(name).expanduser()
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return _open_gguf(path, accept)
    if path.is_file() and path.suffix == ".safetensors":
        return _open_directory(path.parent, accept, path)
    if path.is_dir() and (path / CONFIG).is_file():
        return _open_directory(path, accept, path)
    if path.is_dir():
        return _open_ours(path)
    if path.exists():
        raise ValueError(f"{path} is no checkpoint: a directory, a .safetensors or a .gguf file is needed")
    if is_hub_name(str(name)):
        return replace(_open_directory(found := find_on_hub(str(name)), accept, found), name=str(name))
    raise ValueError(f"{path}: there is no such file or directory, and it is no name on the Hub (organisation/model)")


def _open_directory(directory: Path, accept: Collection[str], tensors: Path) -> Published:
    source = directory / CONFIG
    try:
        text = source.read_text(encoding="utf-8")
        values = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{source} is no JSON object")
    family, config = read_config(values, accept, str(source))
    documents = {**texts(directory), KEPT_CONFIG: text}
    return _published(str(directory), "hf", family, config, open_safetensors(tensors), documents)


def _open_gguf(path: Path, accept: Collection[str]) -> Published:
    found = open_gguf(path, accept)
    family, config = read_config(found.attributes, accept, path.name)
    tokenizer = found.tokenizer()
    documents = {} if tokenizer is None else texts_of(tokenizer)
    documents[KEPT_CONFIG] = json.dumps(dict(found.attributes), indent=2) + "\n"
    return _published(str(path), "gguf", family, config, found.tensors, documents, tokenizer)


def _published(
    name: str,
    kind: str,
    family: Family,
    config: DecoderConfig,
    files: TensorFiles,
    documents: Mapping[str, str],
    tokenizer: Tokenizer | None = None,
) -> Published:
    """Settle whether the head is tied, and hold the files against the model."""
    files = RenamedFiles(files, family.renames)
    settled = settle_head(family, config, files)
    ignored = (*family.ignored, *settled.ignored)
    passed = check(files, family.tensors(settled.config), abstract_params(settled.config), ignored)
    notes = [*settled.notes]
    if buffers := [one for one in passed if one not in settled.copies]:
        more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        notes.append(f"not read, as the model computes it itself: {buffers[0]}{more}")
    return Published(name, kind, family, settled.config, files, documents, tuple(notes), ignored, tokenizer)


def _hint(path: Path) -> str:
    if ggufs := sorted(path.glob("*.gguf")):
        return f"; for a GGUF file give its own path, {ggufs[0]}"
    if any(path.glob("*.safetensors")):
        return f"; there are .safetensors files, but no {CONFIG} beside them: copy it too"
    return f", or a directory of {CONFIG} and .safetensors files"


def _open_ours(path: Path) -> Saved:
    try:
        source = runs.find_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"{error}{_hint(path)}") from None
    documents = Checkpoints(source.directory, writable=False).texts(source.step)
    return Saved(str(path), source, source.run().model, documents)
