"""The leaves of a state as a checkpoint stores them: flat, by name, PRNG keys as integers.

Does not know where they lie on disk: that is `jaxpp.checkpoint_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.checkpoint_files import listed
from jaxpp.tree import named_leaves


def is_under(prefix: str, name: str) -> bool:
    """Say whether `name` lies in the subtree `prefix`; all lie in the subtree without a name."""
    return not prefix or f"{name}/".startswith(f"{prefix}/")


def named_arrays(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Map each name to its array; a Variable without one (optax's MaskedNode) has no name.

    Args:
        tree: a state, or its subtree of the name `prefix`.
        prefix: put before each name.
    """
    named = {name: leaf for name, leaf in named_leaves(tree).items() if jax.tree.leaves(leaf)}
    return {"/".join(filter(None, (prefix, name))): leaf for name, leaf in named.items()}


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


def check_shardings(arrays: Mapping[str, Any]) -> None:
    """Refuse abstract arrays that do not say where they shall lie.

    Raises:
        ValueError: naming those without a sharding.
    """
    loose = [name for name, leaf in arrays.items() if getattr(leaf, "sharding", None) is None]
    if loose:
        raise ValueError(f"no sharding= given to the ShapeDtypeStruct of {listed(loose)}")


def largest_request(entries: Mapping[str, Any], targets: Mapping[str, Any]) -> int:
    """Count the bytes to read for one shard, at most: whole chunks, wherever the shard begins.

    Args:
        entries: orbax's metadata of each array: shape, dtype, chunk shape.
        targets: something with the wanted ``sharding``; without one the array is read whole.
    """
    requests = [0]
    for name, target in targets.items():
        entry, shape = entries[name], tuple(entries[name].shape)
        sharding = getattr(target, "sharding", None)
        whole = {None: (slice(None),) * len(shape)}
        shards = sharding.addressable_devices_indices_map(shape) if sharding else whole
        for index in shards.values():
            num_bytes = np.dtype(entry.dtype).itemsize
            for part, size, chunk in zip(index, shape, entry.storage.chunk_shape, strict=True):
                start, stop, _ = part.indices(size)
                num_bytes *= -(-stop // chunk) * chunk - start // chunk * chunk
            requests.append(num_bytes)
    return max(requests)
