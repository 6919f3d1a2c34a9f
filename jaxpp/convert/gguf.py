"""GGUF files, in: metadata as a config, tensors under Hugging Face names in their layout, vocabulary as a tokenizer.

Weights are dequantised to float32 when they are read, one tensor at a time; half-precision ones stay as they are.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpp.convert.gguf_attributes import GgufHeader, attributes_of
from jaxpp.convert.gguf_names import SIDE_TENSORS, TENSORS, Heads, Place, places
from jaxpp.convert.gguf_tokenizer import tokenizer_of
from jaxpp.convert.tensors import TensorInfo
from jaxpp.names import unknown

if TYPE_CHECKING:
    import gguf
    from gguf.gguf_reader import ReaderTensor

    from jaxpp.data import Tokenizer

_MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_BLOCK_ELEMENTS = 1 << 22  # dequantised at once: 16 MB, so that a tensor's own dequantiser needs no second copy of it


# Types of tensors that are numbers as they are, by their code in the file.
_DIRECT: dict[int, np.dtype] = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    28: np.dtype(np.float64),
    30: np.dtype(jnp.bfloat16),
}


class GgufTensors:
    """The tensors of a GGUF checkpoint, under Hugging Face names."""

    def __init__(self, sources: Mapping[str, tuple[ReaderTensor, Place, str]], heads: Heads) -> None:
        """Take each tensor by the name that it is offered under: its data, its place there, and its file."""
        self._sources, self._heads = dict(sources), heads
        self._infos = {name: _info(*source) for name, source in self._sources.items()}
        self._last: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()

    def names(self) -> Mapping[str, TensorInfo]:
        """Return what is known of each tensor, by name, in the order of the files."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, contiguous and read-only; the last one read is kept, for the shards that read it next."""
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None  # so that there are never two
                self._last = (name, self._decoded(name))
            return self._last[1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        return sum(tensor.n_bytes for tensor, place, _ in self._sources.values() if not place.expert)

    def _decoded(self, name: str) -> np.ndarray:
        tensor, place, _ = self._sources[name]
        data = tensor.data if place.expert is None else tensor.data[place.expert]
        array = place.layout.undo(_dequantised(data, tensor), self._heads)
        array = np.ascontiguousarray(array)
        array.setflags(write=False)
        return array


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF checkpoint, opened: no weight is read yet.

    Args:
        path: of the file, or of the first of its parts.
        attributes: what its ``config.json`` would say.
        tensors: its weights.
        metadata: all keys of the file, as they are.
    """

    path: Path
    attributes: Mapping[str, Any]
    tensors: GgufTensors
    metadata: Mapping[str, Any]

    def tokenizer(self) -> Tokenizer | None:
        """Build the tokenizer from the metadata; None where the file has no vocabulary.

        Raises:
            ValueError: the vocabulary is of a kind that is not supported, or incomplete.
        """
        return tokenizer_of(self.metadata, self.path.name)

    @property
    def chat_template(self) -> str | None:
        """The template that writes a conversation, if there is one."""
        return self.metadata.get("tokenizer.chat_template")


def is_gguf(path: str | Path) -> bool:
    """Return whether a file begins as a GGUF file does."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open_gguf(path: str | Path, accept: Collection[str] = ()) -> GgufCheckpoint:
    """Open a GGUF file, or all parts of a split one.

    Args:
        path: of the file; of a split one, any part.
        accept: metadata, without the architecture's prefix, that may stay unread.

    Raises:
        ValueError: it is no GGUF file, is damaged, lacks a part, or is of an architecture, a quantisation or with
            metadata that are not supported.
    """
    paths = _parts(Path(path).expanduser())
    readers = [_reader(part) for part in paths]
    metadata = _metadata(readers[0])
    architecture, source = str(metadata.get("general.architecture")), paths[0].name
    if architecture not in TENSORS:
        raise ValueError(unknown(f"{source}: unsupported architecture", architecture, TENSORS, "supported"))
    found = [(tensor, part.name) for reader, part in zip(readers, paths, strict=True) for tensor in reader.tensors]
    _check_quantisation([tensor for tensor, _ in found], source)
    side = {tensor.name: np.asarray(tensor.data) for tensor, _ in found if tensor.name in SIDE_TENSORS}
    shapes = {tensor.name: _shape(tensor) for tensor, _ in found}
    attributes = attributes_of(GgufHeader(architecture, metadata, shapes, side), source, accept)
    heads = _heads(attributes)
    return GgufCheckpoint(paths[0], attributes, GgufTensors(_sources(found, architecture, attributes), heads), metadata)


def _parts(path: Path) -> list[Path]:
    """Return the files of a checkpoint, which may be split.

    Raises:
        ValueError: one is missing.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    parts = [path.with_name(f"{stem}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{path}: {len(missing)} of its {count} parts are missing beside it: {', '.join(missing[:3])}")
    return parts


def _reader(path: Path) -> gguf.GGUFReader:
    from gguf import GGUFReader

    if not is_gguf(path):
        raise ValueError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is truncated, damaged or too new: {' '.join(str(error).split())}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} is written for machines of the other byte order; convert it with gguf-convert-endian")
    return reader


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def _check_quantisation(tensors: list[ReaderTensor], source: str) -> None:
    """Refuse a quantisation that cannot be undone, before any tensor is read."""
    from gguf import GGML_QUANT_SIZES, dequantize

    for kind in sorted({tensor.tensor_type for tensor in tensors} - _DIRECT.keys()):
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            name = next(tensor.name for tensor in tensors if tensor.tensor_type == kind)
            raise ValueError(
                f"{source}: quantisation {kind.name} of {name} is not supported; requantise the file, to Q8_0 or F16"
            ) from error


def _sources(
    found: list[tuple[ReaderTensor, str]], architecture: str, attributes: Mapping[str, Any]
) -> dict[str, tuple[ReaderTensor, Place, str]]:
    num_experts = attributes.get("num_experts") or attributes.get("num_local_experts") or 0
    sources, strange = {}, []
    for tensor, file in found:
        own = list(places(architecture, tensor.name, num_experts))
        if not own and tensor.name not in SIDE_TENSORS:
            strange.append(tensor.name)
        if any(place.expert is not None for place in own) and _shape(tensor)[0] != num_experts:
            raise ValueError(f"{file}: {tensor.name} is of {_shape(tensor)[0]} experts; the metadata say {num_experts}")
        sources |= {place.name: (tensor, place, file) for place in own}
    if strange:
        listed = ", ".join(strange[:5])
        raise ValueError(f"{found[0][1]}: {len(strange)} tensors are none of a {architecture} model: {listed}")
    return sources


def _heads(attributes: Mapping[str, Any]) -> Heads:
    query = attributes.get("num_attention_heads") or attributes["n_head"]
    return Heads(query, attributes.get("num_key_value_heads") or query)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _info(tensor: ReaderTensor, place: Place, file: str) -> TensorInfo:
    shape = _shape(tensor) if place.expert is None else _shape(tensor)[1:]
    return TensorInfo(place.layout.shape(shape), _dtype(tensor), file)


def _dtype(tensor: ReaderTensor) -> np.dtype:
    return _DIRECT.get(tensor.tensor_type, np.dtype(np.float32))


def _dequantised(data: np.ndarray, tensor: ReaderTensor) -> np.ndarray:
    """Return the numbers of a tensor, or of one expert of it; in blocks of rows, for the memory that each takes."""
    from gguf import dequantize

    if tensor.tensor_type in _DIRECT:
        return data.view(_dtype(tensor))
    rows = data.reshape(-1, data.shape[-1])
    width = int(tensor.shape[0])
    numbers = np.empty((len(rows), width), np.float32)
    step = max(1, _BLOCK_ELEMENTS // width)
    for start in range(0, len(rows), step):
        numbers[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return numbers.reshape(*data.shape[:-1], width)
