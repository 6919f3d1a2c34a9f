"""More layers: each layer of the target is a copy of one of the source, and may begin as the identity.

Layers are counted from 0; ``[0, 1, 1]`` are three layers, the last two both copies of the source's second. Of a model
whose last layers are on the ladder, as many of the target are as copy one of these without a break up to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpp import tree
from jaxpp.grow.spread import Spread
from jaxpp.grow.step import Step, branch_ends, by_dims, is_norm, scale_offset
from jaxpp.models import DecoderConfig
from jaxpp.models.canonical import shortest, spread
from jaxpp.pretrained import abstract_params


def depth(
    config: DecoderConfig, *, layers: Sequence[int], identities: Sequence[int] = (), name: str = "layers"
) -> Step:
    """Make each layer from one of the source; windows and rotary layers go with it.

    The function is preserved, to the bit, where the layers that are not made identities are those of the source in
    their order, and none that is made one stands directly before one of them that is on the ladder.

    Args:
        config: of the model.
        layers: for each layer of the target, that of the source which it copies.
        identities: layers of the target whose branches add nothing: what writes to the stream (or the norms behind it)
            is zero. It learns from the first step on, the rest of the layer from the second.
        name: of the operator.

    Raises:
        ValueError: fewer layers than there are, or one that there is not.
    """
    _check(config, layers, identities)
    kept = [source for layer, source in enumerate(layers) if layer not in identities]
    same = kept == list(range(config.num_layers))
    num_ladder = _num_ladder(config, layers)
    target = replace(config, num_layers=len(layers), ladder_layers=num_ladder, **_patterns(config, layers))
    maps = {("layers", config.num_layers): Spread(config.num_layers, np.asarray(layers))}
    gap = "" if same else f"the source's layers run {_runs(kept)}, not 0-{config.num_layers - 1}"
    if same and config.ladder_layers and not _rests_on_its_ladder(config, layers, identities, num_ladder):
        gap = "a layer that adds nothing stands before one on the ladder, which reads what was before it"
    return by_dims(name, config, target, maps, changes=_changes(config, identities), gap=gap)


def identity(config: DecoderConfig, *, num_layers: int) -> Step:
    """Insert layers that begin as the identity, spread evenly, each behind the layer that it copies.

    Args:
        config: of the model.
        num_layers: the new number.

    Raises:
        ValueError: fewer layers than there are.

    Source: Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, 2024, section 3.1.
    """
    old = _at_least(config, num_layers)
    more = num_layers - old
    copies = [1 + (layer + 1) * more // old - layer * more // old for layer in range(old)]
    layers = [layer for layer in range(old) for _ in range(copies[layer])]
    inserted = [i for i in range(1, num_layers) if layers[i] == layers[i - 1]]
    return depth(config, layers=layers, identities=inserted, name="identity")


def stack(config: DecoderConfig, *, num_layers: int) -> Step:
    """Repeat the whole stack: ``layer'_i = layer_(i mod L)``. Does not preserve the function.

    Args:
        config: of the model.
        num_layers: the new number; what is no multiple of the old one ends inside a copy.

    Raises:
        ValueError: fewer layers than there are.

    Source: Gong et al., Efficient Training of BERT by Progressively Stacking, 2019; Du et al., Stacking Your
        Transformers, 2024 (G_stack, four times).
    """
    old = _at_least(config, num_layers)
    return depth(config, layers=[i % old for i in range(num_layers)], name="stack")


def interpolate(config: DecoderConfig, *, num_layers: int) -> Step:
    """Repeat each layer in place: ``layer'_i = layer_floor(i L / L')``. Does not preserve the function.

    Args:
        config: of the model.
        num_layers: L', the new number.

    Raises:
        ValueError: fewer layers than there are.

    Source: Chang, Meng, Haber, Tung, Begert, Multi-level Residual Networks from Dynamical Systems View, 2018; Zhang et
        al., AquilaMoE, 2024.
    """
    old = _at_least(config, num_layers)
    return depth(config, layers=[i * old // num_layers for i in range(num_layers)], name="interpolate")


def solar(config: DecoderConfig, *, num_layers: int) -> Step:
    """Join two copies, the first without its last m layers, the second without its first m. Does not preserve.

    Args:
        config: of the model.
        num_layers: ``2 (L - m)``: an even number up to twice the old one.

    Raises:
        ValueError: a number that no m gives, with the nearest that one does.

    Source: Kim et al., SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling, 2023.
    """
    old = config.num_layers
    least, most = old + old % 2, 2 * old
    if num_layers % 2 or not least <= num_layers <= most:
        near = {min(max(n, least), most) for n in (num_layers - num_layers % 2, num_layers + num_layers % 2)}
        fits = " or ".join(map(str, sorted(near)))
        raise ValueError(
            f"{num_layers} layers: solar joins two copies of {old} layers, less as many of each: an even number from "
            f"{least} to {most} is needed, {fits} is nearest; interpolate and stack reach any"
        )
    half = num_layers // 2
    return depth(config, layers=[*range(half), *range(old - half, old)], name="solar")


def explicit(config: DecoderConfig, *, sources: Sequence[int]) -> Step:
    """Make the layers from any list of the source's; see `depth`.

    Args:
        config: of the model.
        sources: for each layer of the target, that of the source which it copies.

    Raises:
        ValueError: as `depth`.
    """
    return depth(config, layers=sources)


def _at_least(config: DecoderConfig, num_layers: int) -> int:
    if num_layers < config.num_layers:
        raise ValueError(f"{num_layers} layers: {config.num_layers} or more are needed, models only grow")
    return config.num_layers


def _check(config: DecoderConfig, layers: Sequence[int], identities: Sequence[int]) -> None:
    """Refuse a list that is too short, or that names layers that there are not."""
    old = config.num_layers
    if wrong := sorted({layer for layer in layers if not 0 <= layer < old}):
        raise ValueError(f"layers {', '.join(map(str, wrong))}: this model has {old}, 0 to {old - 1}")
    if len(layers) < old:
        raise ValueError(f"{len(layers)} source layers: {old} or more are needed, models only grow")
    if wrong := sorted({layer for layer in identities if not 0 <= layer < len(layers)}):
        raise ValueError(
            f"identities {', '.join(map(str, wrong))}: there are {len(layers)} layers, 0 to {len(layers) - 1}"
        )


def _num_ladder(config: DecoderConfig, layers: Sequence[int]) -> int:
    """Count the layers at the end that copy one on the ladder."""
    first = config.num_layers - config.ladder_layers
    return next((i for i, layer in enumerate(reversed(layers)) if layer < first), len(layers))


def _rests_on_its_ladder(
    config: DecoderConfig, layers: Sequence[int], identities: Sequence[int], num_ladder: int
) -> bool:
    """Say whether the source's layers read the streams that they read, where the others add nothing."""
    first = len(layers) - num_ladder
    kept = [layer for layer in range(len(layers)) if layer not in identities]
    between = any(first - 1 <= layer < kept[-1] for layer in identities)
    return not between and sum(layer >= first for layer in kept) == config.ladder_layers


def _patterns(config: DecoderConfig, layers: Sequence[int]) -> dict[str, Any]:
    def follow(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
        old = spread(pattern, config.num_layers)
        return shortest([old[layer] for layer in layers])

    return dict(window_layers=follow(config.window_layers), rope_layers=follow(config.rope_layers))


def _changes(config: DecoderConfig, identities: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the fields of `ByDims` by which layers begin as identities; their gradients are new."""
    if not identities:
        return {}
    fresh = tuple(identities)
    changes: dict[str, dict[str, Any]] = {
        path: dict(fresh=fresh) for path in tree.named_nodes(abstract_params(config)) if path.startswith("blocks/")
    }
    for path in branch_ends(config):
        offset = scale_offset(config) if is_norm(path) and path.endswith("scale") else 0.0
        changes[path] |= dict(zeroed=fresh, offset=offset)
    return changes


def _runs(layers: Sequence[int], most: int = 4) -> str:
    """Write what follows on one another as ranges: ``0-23, 8-31``."""
    ends = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1] + 1]
    runs = [(layers[a], layers[b - 1]) for a, b in zip([0, *ends], [*ends, len(layers)], strict=True)] if layers else []
    words = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return ", ".join([*words[:most], *(["..."] if len(words) > most else [])]) or "nowhere"
