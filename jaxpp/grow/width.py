"""A wider residual stream, and heads and mlp with it.

Every unit of the stream stands there several times. What writes it is copied; what reads it is divided over the copies;
norms are copied, as a mean over copies is the mean. A tied head needs no scale on the logits: the last norm feeds the
head alone, and takes the factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpp.grow.heads import head_maps
from jaxpp.grow.mlp import mlp_maps
from jaxpp.grow.residual import stream_changes, stream_config
from jaxpp.grow.split import Kind, Split
from jaxpp.grow.spread import Spread, cyclic, random_copies, with_tail
from jaxpp.grow.step import Maps, Step, by_dims
from jaxpp.models import DecoderConfig

DEFAULT_NOISE_DB = 15.0


def hypercloning(
    config: DecoderConfig,
    *,
    width: float = 2,
    mlp: float = 0,
    variant: Kind = "symmetric",
    noise_db: float | None = DEFAULT_NOISE_DB,
    seed: int = 0,
) -> Step:
    """Copy all `width` times: the stream, heads (with keys and values, unless there is a single one) and the mlp.

    Args:
        config: of the model.
        width: how many times, a whole number from 2 on.
        mlp: how many times the mlp; 0: as the width.
        variant: how weights are divided over copies; see `Split`.
        noise_db: signal over noise; None: none, and then copies stay copies for ever.
        seed: of the noise.

    Raises:
        ValueError: as said, with the nearest width and the operator that reaches any.

    Source: Samragh et al., Scaling Smart: Accelerating Large Language Model Pre-training with Small Model
        Initialization, 2024, section 3.
    """
    for name, times in (("width", width), ("mlp", mlp or width)):
        if times != int(times) or times < (2 if name == "width" else 1):
            raise ValueError(
                f"{name} {times:g}: hypercloning copies a whole number of times, such as {max(2, round(times))}; "
                "lemon reaches any size (--operator lemon)"
            )
    times = int(width)
    spread = cyclic(config.embed_dim, times * config.embed_dim)
    num_kv_heads = config.num_kv_heads * times if config.num_kv_heads > 1 else 1
    maps: dict[tuple[str, int], Spread] = dict(head_maps(config, times * config.num_heads, num_kv_heads))
    wider, fields = mlp_maps(config, int(mlp or width) * _mlp_dim(config))
    fields |= dict(num_heads=times * config.num_heads, num_kv_heads=num_kv_heads)
    return _wider("hypercloning", config, spread, {**maps, **wider}, fields, Split(variant, noise_db, seed))


def lemon(config: DecoderConfig, *, embed_dim: int = 0, width: float = 0, seed: int = 0) -> Step:
    """Widen the stream to any size: whole copies, and a tail that is zero (layer norms: the mean) wherever it is read.

    Copies share weights unequally, which tells them apart. Norms take ``sqrt(copied / all)``, and an epsilon less by
    the square of that. Heads and mlp stay; `heads` and `mlp` grow them.

    Args:
        config: of the model.
        embed_dim: the new width, at least the old one.
        width: the same as a multiple of the old one.
        seed: of the shares.

    Raises:
        ValueError: a smaller width; layer norms after a branch, which pass no mean on.

    Source: Wang et al., LEMON: Lossless Model Expansion, 2024.
    """
    new = _new_width(config, embed_dim, width)
    if config.norm == "layer" and config.norm_place != "pre" and new % config.embed_dim:
        raise ValueError("lemon: layer norms after a branch do not pass a mean on; hypercloning takes any model")
    spread = with_tail(config.embed_dim, new)
    return _wider("lemon", config, spread, {}, {}, Split("unequal", None, seed))


def net2net(
    config: DecoderConfig,
    *,
    embed_dim: int = 0,
    width: float = 0,
    noise_db: float | None = DEFAULT_NOISE_DB,
    seed: int = 0,
) -> Step:
    """Keep the old units of stream and mlp, and copy units drawn at random; weights are divided over the copies.

    Exact for the mlp. For the stream it is not: units with unequally many copies change the means that norms take.

    Args:
        config: of the model.
        embed_dim: the new width, at least the old one; the mlp grows in proportion.
        width: the same as a multiple of the old one.
        noise_db: signal over noise; None: none.
        seed: of draws and noise.

    Source: Chen, Goodfellow, Shlens, Net2Net, 2016, section 2.3; Chen et al., bert2BERT, 2022 (FPI).
    """
    new = _new_width(config, embed_dim, width)
    spread = random_copies(config.embed_dim, new, seed)
    maps, fields = mlp_maps(
        config, _mlp_dim(config) * new // config.embed_dim, lambda old, new: random_copies(old, new, seed + 1)
    )
    gap = "" if spread.is_even else "units of the stream have unequally many copies, so the means in norms change"
    return _wider("net2net", config, spread, maps, fields, Split("symmetric", noise_db, seed), gap)


def _mlp_dim(config: DecoderConfig) -> int:
    return (config.moe.mlp_dim if config.moe.num_experts else 0) or config.mlp_dim


def _new_width(config: DecoderConfig, embed_dim: int, width: float) -> int:
    new = embed_dim or round(width * config.embed_dim)
    if new < config.embed_dim:
        raise ValueError(f"embed_dim {new}: {config.embed_dim} or more are needed, models only grow")
    return new


def _wider(
    name: str, config: DecoderConfig, embed: Spread, maps: Maps, fields: dict[str, Any], split: Split, gap: str = ""
) -> Step:
    target = replace(config, **{**stream_config(config, embed), **fields})
    changes = stream_changes(config, embed)
    return by_dims(
        name, config, target, {("embed", config.embed_dim): embed, **maps}, split=split, changes=changes, gap=gap
    )
