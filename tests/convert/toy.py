"""A toy checkpoint with every way in which a weight may lie in a file, and its weights by dumb NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.convert.part import Part
from jaxpp.mesh import make_mesh

LAYERS, EXPERTS = 3, 4
SIZES = {
    "layers": LAYERS, "experts": EXPERTS, "embed": 16, "heads": 8, "kv_heads": 4, "head_dim": 2, "mlp": 24, "vocab": 40,
}  # fmt: skip
LAYER = "model.layers.{layer}."
LAYOUTS: dict[str, dict[str, Any]] = {
    "data:1": {},
    "fsdp:8": {"embed": "fsdp"},
    "tensor:2 data:4": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    "fsdp:4 tensor:2": {
        "embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor",
    },
    "expert:4 fsdp:2": {"experts": "expert", "embed": "fsdp"},
    "stage:3 tensor:2": {"layers": "stage", "mlp": "tensor"},
}  # fmt: skip

# path: arrow, parts, and the weight of one layer (and expert) from its file tensor, written the dumb way
WEIGHTS: dict[str, tuple[str, tuple[Part, ...], Callable[[np.ndarray], np.ndarray]]] = {
    "tokens/table": ("vocab -> embed", (Part("model.embed_tokens.weight", "vocab embed"),), lambda w: w),
    "head/kernel": ("embed -> vocab", (Part("lm_head.weight", "vocab embed"),), lambda w: w.T),
    "norm/scale": ("-> embed", (Part("model.norm.weight", "embed"),), lambda w: w),
    "blocks/norm/scale": ("layers | -> embed", (Part(f"{LAYER}norm.weight", "embed"),), lambda w: w),
    "blocks/query": (  # rows [query | key | value], as in Phi-3
        "layers | embed -> heads head_dim",
        (Part(f"{LAYER}q.weight", "(heads head_dim) embed"), Part(f"{LAYER}qkv.weight", "(heads@0/16 head_dim) embed")),
        lambda w: w[:16].T.reshape(16, 8, 2),
    ),
    "blocks/key": (
        "layers | embed -> kv_heads head_dim",
        (Part(f"{LAYER}qkv.weight", "(kv_heads@8/16 head_dim) embed"),),
        lambda w: w[16:24].T.reshape(16, 4, 2),
    ),
    "blocks/value": (
        "layers | embed -> kv_heads head_dim",
        (Part(f"{LAYER}qkv.weight", "(kv_heads@12/16 head_dim) embed"),),
        lambda w: w[24:32].T.reshape(16, 4, 2),
    ),
    **{
        f"blocks/neox/{name}": (  # rows head by head, each [query | key | value], as in GPT-NeoX
            "layers | embed -> heads head_dim",
            (Part(f"{LAYER}query_key_value.weight", f"(heads {i}/3 head_dim) embed"),),
            lambda w, i=i: np.stack([w[6 * head + 2 * i : 6 * head + 2 * i + 2].T for head in range(8)], axis=1),
        )
        for i, name in enumerate(("query", "key", "value"))
    },
    **{
        f"blocks/gpt2/{name}": (  # columns [query | key | value], as in GPT-2
            "layers | embed -> heads head_dim",
            (Part(f"{LAYER}c_attn.weight", f"embed ({i}/3 heads head_dim)"),),
            lambda w, i=i: w[:, 16 * i : 16 * i + 16].reshape(16, 8, 2),
        )
        for i, name in enumerate(("query", "key", "value"))
    },
    "blocks/out": (
        "layers | heads head_dim -> embed",
        (Part(f"{LAYER}o.weight", "embed (heads head_dim)"),),
        lambda w: w.T.reshape(8, 2, 16),
    ),
    "blocks/experts/up": (
        "layers experts | embed -> mlp",
        (Part(f"{LAYER}experts.{{expert}}.up.weight", "mlp embed"),),
        lambda w: w.T,
    ),
    "blocks/experts/gate": (  # all experts in one tensor, as transformers 5 may write them
        "layers experts | embed -> mlp",
        (Part(f"{LAYER}experts.gate_down", "experts (0/2 mlp) embed"),),
        lambda w: w[:, :24].transpose(0, 2, 1),
    ),
    "blocks/experts/down": (
        "layers experts | mlp -> embed",
        (Part(f"{LAYER}experts.gate_down", "experts (1/2 mlp) embed"),),
        lambda w: w[:, 24:],
    ),
}
SHAPES = {
    "model.embed_tokens.weight": (40, 16), "lm_head.weight": (40, 16), "model.norm.weight": (16,), "norm.weight": (16,),
    "qkv.weight": (32, 16), "query_key_value.weight": (48, 16), "c_attn.weight": (16, 48), "o.weight": (16, 16),
    "experts.{expert}.up.weight": (24, 16), "experts.gate_down": (4, 48, 16),
}  # fmt: skip
PARTS = {path: parts for path, (_, parts, _) in WEIGHTS.items()}
WRITTEN = {path: parts[-1:] for path, parts in PARTS.items()}  # the form that `file_tensors` is in


def file_tensors(dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the tensors of the checkpoint, by name; every bit pattern may occur, NaN and -0 among them."""
    draw, found = np.random.default_rng(seed), {}
    for suffix, shape in SHAPES.items():
        layered = not suffix.startswith(("model.", "lm_head"))
        names = [f"model.layers.{layer}.{suffix}" for layer in range(LAYERS)] if layered else [suffix]
        names = [name.replace("{expert}", str(e)) for name in names for e in range(EXPERTS if "{" in name else 1)]
        for name in names:
            width = np.dtype(dtype).itemsize
            found[name] = np.frombuffer(draw.bytes(int(np.prod(shape)) * width), dtype).reshape(shape)
    return found


def weights(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return each weight, whole, from the tensors of the files."""
    found = {}
    for path, (arrow, parts, dumb) in WEIGHTS.items():
        name = parts[-1].tensor
        if "{expert}" in name:
            grid = [[dumb(tensors[parts[-1].name(i, e)]) for e in range(EXPERTS)] for i in range(LAYERS)]
            found[path] = np.array(grid)
        elif arrow.startswith("layers"):
            found[path] = np.array([dumb(tensors[parts[-1].name(i)]) for i in range(LAYERS)])
        else:
            found[path] = dumb(tensors[name])
    return found


def abstract(layout: str = "data:1", dtype: Any = np.float32, only: tuple[str, ...] = tuple(WEIGHTS)) -> nnx.State:
    """Return the abstract state of the toy on a layout."""
    num_devices = int(np.prod([int(word.split(":")[1]) for word in layout.split()]))
    mesh, rules = make_mesh(layout, jax.devices()[:num_devices]), LAYOUTS[layout]
    flat = {}
    for path in only:
        arrow = WEIGHTS[path][0]
        names = dims.parse(arrow).dims
        sharding = NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names)))
        value = jax.ShapeDtypeStruct(tuple(SIZES[name] for name in names), dtype, sharding=sharding)
        flat[tuple(path.split("/"))] = nnx.Param(value, dims=arrow)
    return nnx.from_flat_state(flat)


def bits(array: Any) -> np.ndarray:
    """Return the bytes of an array: equal bits, not only equal numbers."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def same_bits(found: Any, wanted: np.ndarray) -> bool:
    """Say whether two arrays are of one shape, dtype and content."""
    found = np.asarray(found)
    return found.shape == wanted.shape and found.dtype == wanted.dtype and bool((bits(found) == bits(wanted)).all())


def leaves(state: Any) -> dict[str, jax.Array]:
    """Return the arrays of a state by path."""
    return tree.named_leaves(state)


bfloat16 = np.dtype(jnp.bfloat16)
