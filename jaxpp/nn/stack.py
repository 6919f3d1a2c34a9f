"""Stacked blocks: one module whose weights carry a leading dim ``layers``, scanned or unrolled, with remat by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import dims, tree
from jaxpp.names import unknown
from jaxpp.parallel import PRODUCT, active_layout, current, residual
from jaxpp.pipeline.spmd import AXIS, pipelined

KEPT = "block"  # blocks give this `checkpoint_name` to what remat "block" keeps: the outputs of attention and mlp

REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT),
    ),
    "block": jax.checkpoint_policies.save_only_these_names(KEPT),
}


def remat_policy(name: str) -> Callable[..., Any] | None:
    """Look a remat policy up by name.

    Raises:
        ValueError: an unknown name; the nearest is named.
    """
    if name not in REMAT:
        raise ValueError(unknown("plan.remat: unknown policy", name, REMAT))
    return REMAT[name]


def _map_arrows(state: Any, change: Callable[[dims.Arrow], dims.Arrow]) -> Any:
    def one(node: nnx.Variable) -> nnx.Variable:
        text = node.get_metadata()["dims"]
        return node.copy(dims=str(change(dims.parse(text, tuple(dims.parse_words(text))))))

    return jax.tree.map(one, state, is_leaf=tree.is_variable)


def stack_blocks(make: Callable[[jax.Array], nnx.Module], key: jax.Array, num_layers: int) -> nnx.Module:
    """Build blocks as one module with stacked weights.

    Args:
        make: builds one block from a PRNG key.
        key: PRNG key, split once per layer.
        num_layers: number of blocks.

    Returns:
        A module like ``make(key)`` whose Params are ``[layers, ...]`` with arrows ``"layers | ..."``.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
    stacked = jax.vmap(lambda k: nnx.state(make(k)))(jax.random.split(key, num_layers))
    return nnx.merge(graph, _map_arrows(stacked, lambda arrow: arrow.stack("layers")))


class Layers(nnx.Module):
    """Blocks one by one, each with its own weights: no step has to cut them out of a stack.

    Decoding reads every weight once for each token, and a cut is a copy.
    """

    def __init__(self, blocks: Sequence[nnx.Module]):
        """Keep the blocks, first to last."""
        self.blocks = nnx.List(blocks)


def unstack_blocks(blocks: nnx.Module) -> Layers:
    """Return the blocks of a stacked module one by one; each stacked weight is freed as soon as it is cut.

    Args:
        blocks: as `stack_blocks` builds it. It is of no use afterwards.
    """
    graph, state = nnx.split(blocks)
    count = num_blocks(blocks)
    cut = jax.jit(lambda x: [x[i] for i in range(count)])
    columns = []
    leaves, structure = jax.tree.flatten(_map_arrows(state, dims.Arrow.unstack))
    for stacked in leaves:
        columns.append(cut(stacked))
        stacked.delete()
    rows = zip(*columns, strict=True)
    return Layers([nnx.merge(graph, jax.tree.unflatten(structure, row)) for row in rows])


def num_blocks(blocks: nnx.Module) -> int:
    """Return how many blocks a module holds, stacked or one by one."""
    if isinstance(blocks, Layers):
        return len(blocks.blocks)
    return jax.tree.leaves(nnx.state(blocks))[0].shape[0]


def layers_from(each: Sequence[Any], first: int | jax.Array, count: int) -> Sequence[Any]:
    """Return what sets apart `count` layers from number `first` on; traced, where the rank of a pipeline says which."""
    if isinstance(first, int):
        return each[first:][:count]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), stacked)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], own) for i in range(count)]


def split_blocks(blocks: nnx.Module, at: int) -> tuple[nnx.Module, nnx.Module]:
    """Return the first `at` blocks and those from there on, each kept as `blocks` are; either may hold none.

    Cost: a copy of stacked weights, where a loop runs over a part of them.
    """
    if isinstance(blocks, Layers):
        return Layers(blocks.blocks[:at]), Layers(blocks.blocks[at:])
    graph, state = nnx.split(blocks)
    leaves, structure = jax.tree.flatten(state)
    columns = [jax.lax.split(leaf, [at, leaf.shape[0] - at]) for leaf in leaves]  # transposes to one concatenation
    first, rest = (nnx.merge(graph, jax.tree.unflatten(structure, part)) for part in zip(*columns, strict=True))
    return first, rest


def _call(block: Any, *arguments: Any) -> Any:
    return block(*arguments)


def run_blocks(
    blocks: nnx.Module,
    x: Any,
    *shared: Any,
    each: Sequence[Any] | None = None,
    call: Callable[..., Any] = _call,
) -> Any:
    """Run stacked blocks one after another: ``x = block(x, *shared)`` for each layer.

    Scanned, the block is compiled once and its weights are sliced by the loop; unrolled, XLA sees every layer. The plan
    in force names which, and what the backward pass recomputes.

    Args:
        blocks: as `stack_blocks` builds it, or `unstack_blocks`.
        x: the residual stream ``[batch, seq, embed]``, or a tree of several.
        shared: what every layer gets besides (positions, segments).
        each: one more argument for each layer, trees of numbers; they stay Python's own where layers run unrolled.
        call: what runs a block, ``x = call(block, x, *shared)``.

    Returns:
        What the last block returns, as `x`.

    Raises:
        ValueError: several streams over mesh axis ``stage``, which hands one on.
    """
    if isinstance(blocks, Layers):
        for layer, block in enumerate(blocks.blocks):
            x = jax.tree.map(residual, call(block, x, *shared, *(() if each is None else (each[layer],))))
        return x
    graph, state = nnx.split(blocks)
    execution = current()

    def body(x: Any, one: Any, own: tuple[Any, ...], shared: tuple[Any, ...] = shared) -> Any:
        block: Any = nnx.merge(graph, _map_arrows(one, dims.Arrow.unstack))
        return jax.tree.map(residual, call(block, x, *shared, *own))

    policy = remat_policy(execution.remat)
    stacked = () if each is None else (jax.tree.map(lambda *leaves: jnp.stack(leaves), *each),)
    layout = active_layout()
    if layout is not None and layout.mesh.shape.get(AXIS, 1) > 1 and AXIS not in _manual():
        if (count := len(jax.tree.leaves(x))) > 1:
            raise ValueError(
                f"these layers hand on {count} residual streams (ladder_layers), and mesh axis {AXIS}: "
                f"{layout.mesh.shape[AXIS]} hands on one; leave the axis out, or set ladder_layers = 0"
            )

        def chunk(x: jax.Array, layers: Any, shared: tuple[Any, ...]) -> jax.Array:
            return jax.lax.scan(lambda x, one: (body(x, one[0], one[1], shared), None), x, layers)[0]

        return pipelined(chunk, (state, stacked), x, shared, layout, execution.pipeline, policy)
    if execution.layers == "scan":
        scanned = _rematerialised(lambda x, one: (body(x, *one), None), policy, prevent_cse=False)
        return jax.lax.scan(scanned, x, (state, stacked))[0]
    for layer, one in enumerate(_unstack(state)):
        own = () if each is None else (each[layer],)
        x = _rematerialised(lambda x, one, own=own: body(x, one, own), policy, prevent_cse=True)(x, one)
    return x


def _manual() -> tuple[str, ...]:
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _rematerialised(body: Callable[..., Any], policy: Any, prevent_cse: bool) -> Callable[..., Any]:
    return body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)


def _unstack(state: Any) -> list[Any]:
    """Cut a stacked state into one state per layer, by one split per weight (whose transpose is one concatenation)."""
    leaves, structure = jax.tree.flatten(state)
    num_layers = leaves[0].shape[0]
    columns = [[piece[0] for piece in jax.lax.split(leaf, [1] * num_layers)] for leaf in leaves]
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]
