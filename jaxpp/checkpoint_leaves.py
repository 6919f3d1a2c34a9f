"""The leaves of a state as a checkpoint stores them: flat, by name, PRNG keys as integers.

Does not know files: that is `jaxpp.checkpoint_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.tree import named_leaves


def full_name(prefix: str, name: str) -> str:
    """Name, in the whole state, the leaf `name` of the subtree `prefix`; either may be empty."""
    return f"{prefix}/{name}" if prefix and name else prefix or name


def is_under(prefix: str, name: str) -> bool:
    """Say whether `name` lies in the subtree `prefix`; all lie in the subtree without a name."""
    return not prefix or f"{name}/".startswith(f"{prefix}/")


def named_arrays(tree: Any) -> dict[str, Any]:
    """Map each name to its array; a Variable without one (optax's MaskedNode) has no name."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if jax.tree.leaves(leaf)}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_stored(leaf: Any) -> Any:
    """Replace (abstract) PRNG keys by their integers; other leaves pass unchanged."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def as_wanted(data: jax.Array, leaf: Any) -> jax.Array:
    """Undo `as_stored`: make keys of `data` if `leaf` holds keys."""
    if not _is_key(leaf):
        return data
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(data, impl=kinds[0])


def check(arrays: Mapping[str, Any]) -> None:
    """Refuse a state that cannot be saved.

    Raises:
        ValueError: there is no leaf, or one is no ``jax.Array``.
    """
    if not arrays:
        raise ValueError("nothing to save: the state holds no arrays")
    for name, leaf in arrays.items():
        if not isinstance(leaf, jax.Array):
            kind = type(leaf).__name__
            raise ValueError(f"{name} is of type {kind}, needed a jax.Array: jnp.asarray makes one")


def request_bytes(entry: Any, sharding: jax.sharding.Sharding | None) -> int:
    """Bound the bytes reserved to read one shard of `entry`: whole chunks, wherever it begins."""
    shard = sharding.shard_shape(entry.shape) if sharding else entry.shape
    num_bytes = np.dtype(entry.dtype).itemsize
    for size, part, chunk in zip(entry.shape, shard, entry.storage.chunk_shape, strict=True):
        num_bytes *= chunk * min(-(-size // chunk), -(-part // chunk) + 1)
    return num_bytes
