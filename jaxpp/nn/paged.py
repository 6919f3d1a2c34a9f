"""Keys and values in pages, and attention over them: what decoding keeps of the tokens before.

A page holds the keys and values of some consecutive tokens of one row; a table says which pages a row has. Page 0
belongs to nobody: what is written for padding goes there.

Letters: R rows, T new tokens of a row, P pages of a row, L tokens of a page, S = P x L, H heads, K kv_heads, G heads
per kv head, D head_dim, N pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpp.parallel import active_layout
from jaxpp.parallel.local import per_shard

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """The pages of one layer.

    Args:
        keys: ``[pages, kv_heads, page, head_dim]``, turned; int8 where there are scales.
        values: the same.
        key_scales: ``[pages, kv_heads, page]`` fp32, of each token and head; None: keys are stored as they are.
        value_scales: the same of the values.
    """

    keys: Shaped[Array, "pages kv_heads page head_dim"]
    values: Shaped[Array, "pages kv_heads page head_dim"]
    key_scales: Float[Array, "pages kv_heads page"] | None = None
    value_scales: Float[Array, "pages kv_heads page"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table:
    """Which pages hold the tokens of each row.

    Args:
        pages: ``[rows, P]``, in the order of their tokens; 0: none.
        start: ``[rows]``, position of the first token of the first page, a multiple of the page.
    """

    pages: Int[Array, "rows P"]
    start: Int[Array, " rows"]


class PagedCache:
    """The pages of one layer while a program is traced: `attend` writes into them."""

    def __init__(self, pages: Pages, table: Table):
        """Begin with what was written before."""
        self.pages, self.table = pages, table

    def attend(
        self,
        q: Float[Array, "rows T heads head_dim"],
        k: Float[Array, "rows T kv_heads head_dim"],
        v: Float[Array, "rows T kv_heads head_dim"],
        positions: Int[Array, "rows T"],
        *,
        window: int,
        scale: float,
        soft_cap: float,
    ) -> Float[Array, "rows T heads head_dim"]:
        """Write new keys and values, and attend to all that the row has, by position.

        Where the layout splits kv_heads into more parts than there are, each is kept by as many devices.

        Args:
            q: queries, turned.
            k: keys, turned.
            v: values.
            positions: of each token in its row; -1: padding, which writes nothing and whose result means nothing.
            window: keys that a token sees, itself included; 0: all before it.
            scale: factor on the scores.
            soft_cap: scores become ``cap x tanh(scores / cap)``; 0: none.

        Cost: none where heads and kv_heads are split alike; on a layout whose `cache` splits other dims than its
            `inside`, what moves queries, keys and values there and the result back.
        """
        layout = active_layout()
        parts = 1 if layout is None else layout.num_shards("kv_heads", "cache")
        if parts > k.shape[2]:
            k, v = (jnp.repeat(x, parts // x.shape[2], axis=2) for x in (k, v))
        leaves, structure = jax.tree.flatten(self.pages)
        heads, kv_heads = "batch seq heads head_dim", "batch seq kv_heads head_dim"
        stored = ["batch kv_heads page head_dim", "batch kv_heads page"]
        names = [stored[leaf.ndim == 3] for leaf in leaves]

        def local(q: Any, k: Any, v: Any, positions: Any, table: Any, start: Any, *leaves: Any) -> Any:
            pages = _write(jax.tree.unflatten(structure, leaves), Table(table, start), k, v, positions)
            y = _read(pages, Table(table, start), q, positions, window=window, scale=scale, soft_cap=soft_cap)
            return (y, *jax.tree.leaves(pages))

        arguments = (q, k, v, positions, self.table.pages, self.table.start, *leaves)
        dims = (heads, kv_heads, kv_heads, "batch seq", "batch page", "batch", *names)
        y, *leaves = per_shard(local, arguments, dims, (heads, *names), "cache")
        self.pages = jax.tree.unflatten(structure, leaves)
        return y


def empty_pages(num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: Any) -> Pages:
    """Return pages of zeros; ``dtype`` int8 keeps a scale for each token and head."""
    shape = (num_pages, kv_heads, page_size, head_dim)
    values = jnp.zeros(shape, dtype)
    if jnp.dtype(dtype) != jnp.int8:
        return Pages(values, jnp.zeros(shape, dtype))
    return Pages(values, jnp.zeros(shape, dtype), jnp.zeros(shape[:3]), jnp.zeros(shape[:3]))


def _write(pages: Pages, table: Table, k_RTKD: jax.Array, v_RTKD: jax.Array, positions: jax.Array) -> Pages:
    size = pages.keys.shape[2]
    behind = jnp.maximum(positions, 0) - table.start[:, None]
    page = jnp.where(positions < 0, 0, jnp.take_along_axis(table.pages, behind // size, axis=1, mode="clip"))
    at = behind % size
    if pages.key_scales is None or pages.value_scales is None:
        put = partial(_put, page=page, at=at)
        return Pages(put(pages.keys, k_RTKD), put(pages.values, v_RTKD))
    (k8, k_scales), (v8, v_scales) = _int8(k_RTKD), _int8(v_RTKD)
    stored = (pages.keys, pages.values, pages.key_scales, pages.value_scales)
    new = (k8, v8, k_scales, v_scales)
    return Pages(*(_put(old, one, page=page, at=at) for old, one in zip(stored, new, strict=True)))


def _put(stored: jax.Array, new: jax.Array, *, page: jax.Array, at: jax.Array) -> jax.Array:
    return stored.at[page, :, at].set(new.astype(stored.dtype))


def _int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``x / scale`` rounded and the scale of each token and head: its largest number becomes 127."""
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / 127
    return jnp.round(wide / jnp.maximum(scale, 1e-30)[..., None]).astype(jnp.int8), scale


def _gather(stored_NKLx: jax.Array, table_RP: jax.Array) -> jax.Array:
    """Return ``[R, K, P x L, ...]``: one copy, of whole pages."""
    heads = jnp.arange(stored_NKLx.shape[1])[None, :, None]
    found = stored_NKLx.at[table_RP[:, None, :], heads].get(mode="promise_in_bounds")
    return found.reshape(*found.shape[:2], -1, *found.shape[4:])


def _read(
    pages: Pages, table: Table, q_RTHD: jax.Array, positions: jax.Array, *, window: int, scale: float, soft_cap: float
) -> jax.Array:
    (rows, seq, heads, head_dim), kv_heads = q_RTHD.shape, pages.keys.shape[1]
    wide = jnp.promote_types(q_RTHD.dtype, jnp.float32)
    k_RKSD, v_RKSD = (_gather(x, table.pages).astype(q_RTHD.dtype) for x in (pages.keys, pages.values))
    q_RKXD = q_RTHD.reshape(rows, seq, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    q_RKXD = q_RKXD.reshape(rows, kv_heads, -1, head_dim)  # X = G x T: plain products, which run fastest
    s_RKXS = jnp.einsum("rkxd,rksd->rkxs", q_RKXD, k_RKSD, preferred_element_type=wide) * scale
    if pages.key_scales is not None:
        s_RKXS = s_RKXS * _gather(pages.key_scales, table.pages)[:, :, None]
    s_RKXS = soft_cap * jnp.tanh(s_RKXS / soft_cap) if soft_cap else s_RKXS
    at_RS = table.start[:, None] + jnp.arange(k_RKSD.shape[2])
    seen_RTS = at_RS[:, None] <= positions[..., None]
    if window:
        seen_RTS &= positions[..., None] - at_RS[:, None] < window
    s_RKGTS = s_RKXS.reshape(rows, kv_heads, -1, seq, at_RS.shape[1])
    p_RKGTS = jax.nn.softmax(jnp.where(seen_RTS[:, None, None], s_RKGTS, jnp.finfo(wide).min), axis=-1)
    p_RKXS = p_RKGTS.reshape(s_RKXS.shape)
    if pages.value_scales is not None:
        p_RKXS = p_RKXS * _gather(pages.value_scales, table.pages)[:, :, None]
    y_RKXD = jnp.einsum("rkxs,rksd->rkxd", p_RKXS.astype(v_RKSD.dtype), v_RKSD)
    y_RTKGD = y_RKXD.reshape(rows, kv_heads, -1, seq, head_dim).transpose(0, 3, 1, 2, 4)
    return y_RTKGD.reshape(rows, seq, heads, head_dim)
