"""A wider mlp: hidden units are copied, and what reads them is divided over the copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxpp.grow.split import Kind, Split
from jaxpp.grow.spread import Spread, cyclic
from jaxpp.grow.step import Maps, Step, by_dims
from jaxpp.models import DecoderConfig


def mlp(
    config: DecoderConfig,
    *,
    mlp_dim: int,
    variant: Kind = "symmetric",
    noise_db: float | None = 15.0,
    seed: int = 0,
) -> Step:
    """Widen the mlp, or each expert, to any size from the old one on; a shared expert in proportion.

    Args:
        config: of the model.
        mlp_dim: the new width.
        variant: how the weights back to the stream are divided; see `Split`.
        noise_db: signal over noise; None: none.
        seed: of the noise.

    Raises:
        ValueError: a smaller width.
    """
    maps, fields = mlp_maps(config, mlp_dim)
    return by_dims("mlp", config, replace(config, **fields), maps, split=Split(variant, noise_db, seed))


def mlp_maps(
    config: DecoderConfig, mlp_dim: int, make: Callable[[int, int], Spread] = cyclic
) -> tuple[Maps, dict[str, Any]]:
    """Return the maps of dim ``mlp``, and the fields of the config that change with it.

    Args:
        config: of the model.
        mlp_dim: the new width of the mlp, or of each expert.
        make: old and new size to a spread.

    Raises:
        ValueError: a smaller width.
    """
    moe = config.moe
    old = (moe.mlp_dim or config.mlp_dim) if moe.num_experts else config.mlp_dim
    if mlp_dim < old:
        raise ValueError(f"mlp_dim {mlp_dim}: {old} or more are needed, models only grow")
    maps = {("mlp", old): make(old, mlp_dim)}
    if not moe.num_experts:
        return maps, dict(mlp_dim=mlp_dim)
    shared = moe.shared_mlp_dim
    if shared and shared != old:
        maps["mlp", shared] = make(shared, shared * mlp_dim // old)
    experts = replace(moe, mlp_dim=mlp_dim, shared_mlp_dim=maps["mlp", shared].new if shared else 0)
    return maps, dict(moe=experts, mlp_dim=config.mlp_dim * mlp_dim // old)
