"""From one format to another, and from any of them to a model on a mesh: `load`, `save`, `convert`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp import dims, runtime, tree
from jaxpp.checkpoint import Checkpoints
from jaxpp.compress import Quantization, refuse_quantized
from jaxpp.compress.quantization import install
from jaxpp.convert.export import Make, write_safetensors
from jaxpp.data import Tokenizer
from jaxpp.data.published import TEXTS
from jaxpp.documents import attributes_to_write, beside_ours, beside_published, family_to_write
from jaxpp.filling import cut_off, filled_up
from jaxpp.mesh import Device, MeshSpec
from jaxpp.model import ModelConfig
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Execution, Layout, Plan
from jaxpp.pretrained import CONFIG, Checkpoint, Progress, abstract_params, open_checkpoint

Format = Literal["hf", "orbax"]
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a loaded model knows of where it came from.

    Args:
        execution: how a call of it runs.
        tokenizer: of the checkpoint; None where it has none.
        texts: the documents that travel with the weights.
        notes: what the user should know of how it was read.
    """

    execution: Execution
    tokenizer: Tokenizer | None
    texts: Mapping[str, str]
    notes: tuple[str, ...] = ()


def load(
    source: str | Path | Checkpoint,
    mesh: str = "data:1",
    *,
    dtype: str | None = None,
    devices: Sequence[Device] | None = None,
    quantize: str | Quantization = "",
    accept: Collection[str] = (),
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint of any format as a sharded model.

    Each device's slices are read from disk straight onto it; on several processes all make the same call.

    Args:
        source: as `jaxpp.pretrained.open_checkpoint` takes, or what it returns.
        mesh: where the weights go, ``"tensor:4 data:2"``; on the first devices, as many as it names.
        dtype: of the weights, and so of the computation: ``"float32"``, ``"bfloat16"``; None: bfloat16 where the
            checkpoint is, else float32.
        devices: the devices to use.
        quantize: ``"int8"`` or ``"int4"``, or a `jaxpp.compress.Quantization`: each weight is quantised as soon as it
            is read, so that beside what is kept there is at most one weight; the model runs forward only. Empty: not.
        accept: attributes of a ``config.json`` that may stay unread.
        progress: called with the bytes read since the last call.

    Returns:
        The ``nnx`` module, with ``.config`` and ``.tokenizer``; ``model(tokens)`` gives logits.

    Raises:
        ValueError: the checkpoint cannot be read exactly, the mesh cannot hold its weights, or these cannot be
            quantised in such groups.
    """
    how = Quantization(quantize) if isinstance(quantize, str) and quantize else quantize
    checkpoint = open_checkpoint(source, accept) if isinstance(source, str | Path) else source
    plan = Plan(mesh=mesh)
    layout = layout_of(checkpoint, mesh, devices)
    chosen = jnp.dtype(check_dtype(dtype)) if dtype else usual_dtype(checkpoint)
    wanted = like(checkpoint, layout, chosen)
    params = wanted if how else checkpoint.read(wanted, progress)
    config = filled_up(checkpoint.config, layout)
    graph, _, other = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)
    model: Any = nnx.merge(graph, params, other)
    if how:
        _read_quantized(model, checkpoint, wanted, how, progress)
    model.loaded = Loaded(plan.execution(layout), checkpoint.tokenizer(), checkpoint.texts, checkpoint.notes)
    return model


def _read_quantized(
    model: Any, checkpoint: Checkpoint, wanted: Any, how: Quantization, progress: Progress | None
) -> None:
    """Put the weights of a checkpoint into an abstract model, one by one."""
    how.check(wanted)
    for path, node in tree.named_nodes(wanted).items():
        found = checkpoint.read({path: node}, progress)[path]
        weight = how.apply(found) or found.get_value()
        install(model, path, jax.block_until_ready(weight))


def layout_of(checkpoint: Checkpoint, mesh: str, devices: Sequence[Device] | None = None) -> Layout:
    """Return the layout of a checkpoint's weights on a mesh.

    Where grouped queries have fewer kv heads than axis ``tensor`` has devices, several of these hold the same ones.

    Raises:
        ValueError: the mesh does not fit the devices.
    """
    layout = Plan(mesh=mesh).layout(devices if devices is not None else named_devices(mesh))
    config = checkpoint.config
    return layout.shared("kv_heads", config.num_kv_heads) if isinstance(config, DecoderConfig) else layout


def named_devices(mesh: str) -> Sequence[Device]:
    """Return as many devices as a mesh names; all of them where it takes the rest, or more than there are."""
    spec = MeshSpec.parse(mesh)
    free = -1 in spec.ici.values()
    return jax.devices() if free else jax.devices()[: math.prod(map(spec.size, spec.axes))]


def like(checkpoint: Checkpoint, layout: Layout, dtype: Any = None) -> Any:
    """Return the weights of a checkpoint as ``jax.ShapeDtypeStruct`` on a layout; None keeps each stored dtype.

    A vocabulary that the layout does not split is filled up with rows that stand for no token.

    Raises:
        ValueError: the layout cannot hold a weight.
    """
    params, stored = abstract_params(filled_up(checkpoint.config, layout)), checkpoint.dtypes
    layout.check(params)

    def one(path: str, node: Any) -> jax.ShapeDtypeStruct:
        place = layout.sharding(dims.of(node, path, layout.dims).dims, node.shape, "weights", path)
        return jax.ShapeDtypeStruct(node.shape, dtype or stored.get(path, node.dtype), sharding=place)

    return tree.map_named(one, params)


def usual_dtype(checkpoint: Checkpoint) -> Any:
    """Return bfloat16 where most of the checkpoint is, else float32: float16 overflows in wide activations."""
    nodes, elements = tree.named_nodes(abstract_params(checkpoint.config)), dict[Any, int]()
    for path, dtype in checkpoint.dtypes.items():
        elements[dtype] = elements.get(dtype, 0) + math.prod(nodes[path].shape)
    most = max(elements, key=lambda dtype: elements[dtype], default=np.dtype(np.float32))
    return jnp.dtype(jnp.bfloat16) if most == jnp.bfloat16 else jnp.dtype(jnp.float32)


def check_dtype(dtype: str) -> str:
    """Return the name of a dtype that weights may have.

    Raises:
        ValueError: it is none of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ValueError(f'dtype "{dtype}": one of {", ".join(DTYPES)} is needed')
    return dtype


def save(
    model: Any,
    target: str | Path,
    format: Format = "hf",
    *,
    family: str = "",
    max_file_bytes: float = 5e9,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a model as a Hugging Face directory or as one of our checkpoints.

    Args:
        model: a decoder, sharded in any way; on several processes all make the same call.
        target: the directory.
        format: ``"hf"``: safetensors, config, generation config and tokenizer, which transformers loads; ``"orbax"``:
            step 0 of a checkpoint directory, from which `jaxpp train` and `load` read.
        family: ``model_type`` to write; by default that of the checkpoint it came from, else the first that can hold
            the config.
        max_file_bytes: largest safetensors file; a larger tensor has a file of its own.
        overwrite: replace a checkpoint that lies in `target`.
        progress: called with the bytes written since the last call.

    Raises:
        ValueError: `target` holds a checkpoint already, no family holds the model's config, or it is quantised.
    """
    refuse_quantized(model, "save the model")
    loaded = getattr(model, "loaded", None)
    texts = dict(loaded.texts) if loaded else {}
    check_target(target, format, overwrite)
    params = nnx.split(model, nnx.Param, ...)[1]
    if format == "orbax":
        _write_ours(params, model.config, texts, target, progress)
    else:
        params, config = cut_off(params, model.config)
        _write_published(params, config, texts, target, family, max_file_bytes, progress)


def convert(
    source: str | Path | Checkpoint,
    target: str | Path,
    to: Format,
    *,
    mesh: str = "data:1",
    dtype: str | None = None,
    family: str = "",
    max_file_bytes: float = 5e9,
    accept: Collection[str] = (),
    overwrite: bool = False,
    reading: Progress | None = None,
    writing: Progress | None = None,
) -> None:
    """Turn a checkpoint of any format into another, through the shards of a mesh.

    To ``hf`` the weights go one by one, so that none but the largest need fit at a time.

    Args:
        source: as `load` takes.
        target: the directory to write.
        to: ``"hf"`` or ``"orbax"``.
        mesh: where the weights stand in between.
        dtype: of all weights; None: each as it is stored.
        family: as `save` takes.
        max_file_bytes: as `save` takes.
        accept: as `load` takes.
        overwrite: replace a checkpoint that lies in `target`.
        reading: called with the bytes read since the last call.
        writing: called with the bytes written since the last call.

    Raises:
        ValueError: as `load` and `save`, before a weight is read.
    """
    checkpoint = open_checkpoint(source, accept) if isinstance(source, str | Path) else source
    check_target(target, to, overwrite, checkpoint.name)
    if to == "hf":
        family = family_to_write(checkpoint.config, checkpoint.texts, family).model_type
    layout = layout_of(checkpoint, mesh)
    wanted = like(checkpoint, layout, jnp.dtype(check_dtype(dtype)) if dtype else None)
    config = filled_up(checkpoint.config, layout)
    if to == "orbax":
        _write_ours(checkpoint.read(wanted, reading), config, checkpoint.texts, target, writing)
        return
    nodes = tree.named_nodes(wanted)

    def make(paths: Sequence[str]) -> Mapping[str, jax.Array]:
        some = checkpoint.read({path: nodes[path] for path in paths}, reading)
        return tree.named_leaves(cut_off(some, config)[0])

    params, config = _without_filling(wanted, config)
    _write_published(params, config, checkpoint.texts, target, family, max_file_bytes, writing, make)


def check_target(target: str | Path, to: str, overwrite: bool, source: Any = None) -> None:
    """Refuse a directory to write into that is a file, is the source, or holds a checkpoint.

    To overwrite replaces a checkpoint of the same format only: nobody should lose the steps of a run to an export, and
    of two formats side by side the older one might be read.

    Raises:
        ValueError: as said, with the way out.
    """
    path = Path(target).expanduser()
    if to not in ("hf", "orbax"):
        raise ValueError(f'format "{to}": "hf" or "orbax" is needed')
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; a directory is needed")
    if not path.is_dir():
        return
    given = Path(source).expanduser().resolve() if isinstance(source, str | Path) else None
    published = sorted([*path.glob(CONFIG), *path.glob("*.safetensors")])
    ours = [one for one in sorted(path.iterdir()) if one.name.isdigit() or one.name == "checkpoints"]
    held = [*published, *ours]
    replaced = published if to == "hf" else [one for one in ours if one.name == "0"]
    if given is not None and held and given in (path.resolve(), *(one.resolve() for one in held)):
        raise ValueError(f"{path} is where the source itself lies; write into another directory")
    if kept := [one.name for one in held if one not in replaced]:
        raise ValueError(f"{path} holds another checkpoint ({kept[0]}), which would stay; write into another directory")
    if held and not overwrite:
        raise ValueError(f"{path} holds a checkpoint already ({held[0].name}); overwrite it with --overwrite")


def _without_filling(wanted: Any, config: ModelConfig) -> tuple[Any, ModelConfig]:
    """Return abstract weights, and their config, without the rows that stand for no token."""
    if isinstance(config, DecoderConfig):
        config = dataclasses.replace(config, vocab_rows=0)
    dtypes = {path: leaf.dtype for path, leaf in tree.named_leaves(wanted).items()}
    params = abstract_params(config)
    return tree.map_named(lambda path, node: jax.ShapeDtypeStruct(node.shape, dtypes[path]), params), config


def _write_ours(
    params: Any, config: ModelConfig, texts: Mapping[str, str], target: str | Path, progress: Progress | None
) -> None:
    params, config = cut_off(params, config)
    with Checkpoints(Path(target).expanduser(), asynchronous=False) as checkpoints:
        checkpoints.save(0, {"params": params}, beside_ours(config, texts), overwrite=0 in checkpoints.steps())
    if progress:
        progress(tree.total_bytes(params))


def _write_published(
    params: Any,
    config: ModelConfig,
    texts: Mapping[str, str],
    target: str | Path,
    family: str,
    max_file_bytes: float,
    progress: Progress | None,
    make: Make | None = None,
) -> None:
    """Write weights, or abstract ones that `make` makes, and the documents beside them."""
    path = Path(target).expanduser()
    chosen = family_to_write(config, texts, family)
    assert isinstance(config, DecoderConfig)
    documents = beside_published(texts)
    attributes = attributes_to_write(config, {**texts, **documents}, chosen.model_type, params)
    parts = chosen.tensors(config)
    write_safetensors(path, parts, params, make=make, max_file_bytes=max_file_bytes, progress=progress)
    if runtime.is_main():
        for name in TEXTS:  # of a checkpoint that was replaced
            (path / name).unlink(missing_ok=True)
        for name, text in {**documents, CONFIG: json.dumps(attributes, indent=2) + "\n"}.items():
            (path / name).write_text(text, encoding="utf-8")
