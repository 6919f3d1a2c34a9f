"""More attention heads: whole groups of queries with their key and value, or more queries in each group.

A head is copied whole; the output projection is divided over its copies. Queries must stay beside the key that they
were trained with: in a group that keeps its key the copies stand inside the group, not behind all heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxpp.grow.split import Kind, Split
from jaxpp.grow.spread import Spread, cyclic
from jaxpp.grow.step import Maps, Step, by_dims
from jaxpp.models import DecoderConfig


def heads(
    config: DecoderConfig,
    *,
    num_heads: int,
    num_kv_heads: int = 0,
    variant: Kind = "symmetric",
    noise_db: float | None = 15.0,
    seed: int = 0,
) -> Step:
    """Add heads; their number need not be a multiple of the old one.

    Args:
        config: of the model.
        num_heads: the new number.
        num_kv_heads: the new number of keys and values; 0: whole groups where `num_heads` has them, else as it is.
        variant: how the output projection is divided; see `Split`.
        noise_db: signal over noise; None: none.
        seed: of the noise.

    Raises:
        ValueError: numbers that fit no grouping of the old heads, with those that do.
    """
    maps = head_maps(config, num_heads, num_kv_heads)
    kv_heads = maps["kv_heads", config.num_kv_heads].new
    target = replace(config, num_heads=num_heads, num_kv_heads=kv_heads)
    return by_dims("heads", config, target, maps, split=Split(variant, noise_db, seed))


def head_maps(config: DecoderConfig, num_heads: int, num_kv_heads: int = 0) -> Maps:
    """Return the maps of ``heads`` and ``kv_heads``.

    Raises:
        ValueError: as `heads`.
    """
    old, old_kv = config.num_heads, config.num_kv_heads
    group = old // old_kv
    kv_heads = num_kv_heads or _kv_heads(old, old_kv, num_heads)
    if kv_heads < old_kv or num_heads % kv_heads or num_heads // kv_heads < group:
        by_groups, inside = (range(old, 2 * old + 1, step) for step in (group, old_kv))
        fits = sorted({*by_groups, *inside})
        given = f"{num_heads} heads" + (f" on {num_kv_heads} kv heads" if num_kv_heads else "")
        raise ValueError(
            f"{given}: {old} heads in {old_kv} groups of {group} grow by whole groups (multiples of {group}) or inside "
            f"their groups (multiples of {old_kv}): {', '.join(map(str, fits))} and so on"
        )
    new_group = num_heads // kv_heads
    source = (np.arange(kv_heads)[:, None] % old_kv) * group + np.arange(new_group)[None] % group
    spread = Spread(old, source.reshape(-1))
    if config.qk_norm == "full" and not (spread.is_even and cyclic(old_kv, kv_heads).is_even):
        raise ValueError(
            f"{num_heads} heads: the norm of queries and keys is over all heads, so each needs as many copies; "
            f"{old * 2} or {old * 3} would do"
        )
    return {("heads", old): spread, ("kv_heads", old_kv): cyclic(old_kv, kv_heads)}


def _kv_heads(old: int, old_kv: int, num_heads: int) -> int:
    """Choose whole groups where they fit; a single key stays one (MQA)."""
    group = old // old_kv
    whole = num_heads % group == 0 and num_heads >= old
    return num_heads // group if whole and old_kv > 1 else old_kv
