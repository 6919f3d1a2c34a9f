"""From one model's config to another's: which operators lead there, or which dim cannot be reached.

What comes out has the target's sizes. It keeps the source's epsilon of norms (less by what `lemon` asks for), and where
heads get wider, rotary frequencies that no preset has. The longest sequence is the target's where positions are rotary,
as no weight and no logit depends on it; so are the weights of the losses that balance experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from jaxpp.grow.depth import depth
from jaxpp.grow.operators import DEPTH, OPERATORS
from jaxpp.grow.step import Step
from jaxpp.grow.width import DEFAULT_NOISE_DB
from jaxpp.models import FAMILIES, DecoderConfig
from jaxpp.models.canonical import canonical, spread
from jaxpp.names import unknown

_GROW = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size", "num_layers")
_BY_LAYER = ("window_layers", "rope_layers")
_FREE = (
    "norm_epsilon",
    "vocab_rows",
    "rotary_dim",
    "moe",
    "max_positions",
    *_BY_LAYER,
)  # compared in other ways or not


def preset(name: str) -> DecoderConfig:
    """Return the config of a preset of any family.

    Raises:
        ValueError: there is none of that name; says the nearest.

    Example:
        >>> preset("smollm2-360m").embed_dim
        960
    """
    known = {size: values for _, sizes in FAMILIES.values() for size, values in sizes.items()}
    if name not in known:
        raise ValueError(unknown("target: unknown preset", name, known))
    return DecoderConfig(**known[name])


def steps_to(
    config: DecoderConfig,
    target: DecoderConfig,
    *,
    noise_db: float | None = DEFAULT_NOISE_DB,
    seed: int = 0,
    depth_op: str = "identity",
) -> tuple[Step, ...]:
    """Return the steps from a model to the sizes of another, each on what the one before made.

    Stream, heads and mlp that grow by one whole factor are cloned together; else the stream grows by `lemon`, heads and
    mlp each by its own operator. Then size of heads, mlp, tokens, layers, experts.

    Args:
        config: of the model.
        target: whose sizes to reach.
        noise_db: signal over noise, of what tells copies apart; None: none.
        seed: of the first step; the others count on.
        depth_op: one of `jaxpp.grow.operators.DEPTH`.

    Returns:
        The steps; none where nothing grows.

    Raises:
        ValueError: models that differ in more than size, naming the fields; a dim that cannot be reached, with the
            nearest size that can.
    """
    if depth_op not in DEPTH:
        raise ValueError(unknown("depth_op: unknown", depth_op, DEPTH))
    check_families(config, target)
    check_sizes(config, target)
    steps: list[Step] = []

    def grow(name: str, **options: Any) -> None:
        at, seeded = steps[-1].target if steps else config, name not in ("vocab", *DEPTH)
        steps.append(OPERATORS[name].make(at, **options, **(dict(seed=seed + len(steps)) if seeded else {})))

    slices = _slices(config, target)
    _grow_width(grow, config, target, slices, noise_db)
    if target.head_dim != config.head_dim:
        grow("head_dim", head_dim=target.head_dim, noise_db=noise_db)
    if target.vocab_size != config.vocab_size:
        grow("vocab", vocab_size=target.vocab_size)
    if target.num_layers != config.num_layers:
        at = steps[-1].target if steps else config
        if depth_op == "identity" and (layers := _aligned(config, target)):
            steps.append(depth(at, layers=layers[0], identities=layers[1], name="identity"))
        else:
            grow(depth_op, num_layers=target.num_layers)
    if slices:
        _grow_experts(grow, target, slices)
    if steps:
        steps[-1] = replace(steps[-1], target=_of_no_weight(steps[-1].target, target))
    _check_reached(config, steps[-1].target if steps else config, target)
    return tuple(steps)


def _of_no_weight(found: DecoderConfig, target: DecoderConfig) -> DecoderConfig:
    """Take from the target what neither a weight nor a logit depends on."""
    moe = replace(found.moe, balance_loss=target.moe.balance_loss, z_loss=target.moe.z_loss)
    return replace(found, max_positions=target.max_positions, moe=moe)


def check_families(config: DecoderConfig, target: DecoderConfig) -> None:
    """Refuse models that differ in more than size.

    Raises:
        ValueError: names the fields.
    """
    old, new = canonical(config), canonical(target)
    wrong = [f"{name} {a} against {b}" for name, a, b in _differences(old, new, {*_GROW, *_FREE})]
    if old.positions == "rope" == new.positions and old.rotary_dim * new.head_dim != new.rotary_dim * old.head_dim:
        parts = (f"{one.rotary_dim} of {one.head_dim}" for one in (old, new))
        wrong.append(f"rotary_dim {' against '.join(parts)}")
    if old.positions == "learned" == new.positions and old.max_positions != new.max_positions:
        wrong.append(f"max_positions {old.max_positions} against {new.max_positions} (learned: each is a weight)")
    if wrong:
        raise ValueError(f"source and target are of different families: {', '.join(wrong)}")


def _differences(old: Any, new: Any, free: Collection[str], within: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name and both values, in words, of each field that differs, those in `free` left out."""
    for name in (field.name for field in fields(old) if field.name not in free):
        a, b = getattr(old, name), getattr(new, name)
        if is_dataclass(a):
            yield from _differences(a, b, (), f"{name}.")
        elif a != b:
            yield within + name, _word(a), _word(b)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mlp_dim(config: DecoderConfig) -> int:
    """Return the width of the mlp, or of each expert."""
    return (config.moe.mlp_dim if config.moe.num_experts else 0) or config.mlp_dim


def check_sizes(config: DecoderConfig, target: DecoderConfig) -> None:
    """Refuse a target that is smaller in some dim.

    Raises:
        ValueError: names the dims.
    """
    pairs = {name: (getattr(config, name), getattr(target, name)) for name in _GROW if name != "mlp_dim"}
    if bool(config.moe.num_experts) == bool(target.moe.num_experts):
        pairs["mlp_dim"] = _mlp_dim(config), _mlp_dim(target)
    if smaller := [f"{name} {new} ({old} or more can be reached)" for name, (old, new) in pairs.items() if new < old]:
        raise ValueError(f"models only grow, and the target has {', '.join(smaller)}")


def _slices(config: DecoderConfig, target: DecoderConfig) -> int:
    """Return into how many experts each copy of the mlp is cut; 0: no experts are made.

    Raises:
        ValueError: a mixture cannot become one of another number of experts, nor an mlp any mixture.
    """
    old, new = config.moe, target.moe
    if old.num_experts:
        if old.num_experts != new.num_experts:
            raise ValueError(f"num_experts {new.num_experts}: a mixture keeps the {old.num_experts} experts it has")
        return 0
    if not new.num_experts:
        return 0
    if new.shared_mlp_dim:
        raise ValueError(
            f"moe.shared_mlp_dim {new.shared_mlp_dim}: no operator makes a shared expert; 0 can be reached"
        )
    common = [n for n in range(1, new.experts_per_token + 1) if not (new.experts_per_token % n or new.num_experts % n)]
    wide = [n for n in common if n * _mlp_dim(target) >= config.mlp_dim]
    if not wide:
        least = -(-config.mlp_dim // common[-1])
        raise ValueError(
            f"experts of mlp_dim {_mlp_dim(target)}: {new.experts_per_token} of {new.num_experts} are at most slices "
            f"of 1/{common[-1]} of an mlp of {config.mlp_dim}, so that {least} or more are needed"
        )
    return wide[0]


def _grow_width(
    grow: Callable[..., None], config: DecoderConfig, target: DecoderConfig, slices: int, noise_db: float | None
) -> None:
    """Grow stream, heads and mlp; an mlp that is to be cut into slices to the width of all of them."""
    mlp_dim = _mlp_dim(target) * max(1, slices)
    if factor := _whole_factor(config, target, mlp_dim):
        return grow("hypercloning", width=factor, noise_db=noise_db)
    if target.embed_dim != config.embed_dim:
        grow("lemon", embed_dim=target.embed_dim)
    if (target.num_heads, target.num_kv_heads) != (config.num_heads, config.num_kv_heads):
        grow("heads", num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, noise_db=noise_db)
    if mlp_dim != _mlp_dim(config):
        grow("mlp", mlp_dim=mlp_dim, noise_db=noise_db)


def _whole_factor(config: DecoderConfig, target: DecoderConfig, mlp_dim: int) -> int:
    """Return the one factor by which stream, heads and mlp grow; 0: there is none, or it is 1."""
    factor = target.embed_dim // config.embed_dim
    kv_heads = config.num_kv_heads * factor if config.num_kv_heads > 1 else 1
    wanted = (config.embed_dim * factor, config.num_heads * factor, kv_heads, _mlp_dim(config) * factor)
    same = wanted == (target.embed_dim, target.num_heads, target.num_kv_heads, mlp_dim)
    return factor if factor > 1 and same else 0


def _aligned(config: DecoderConfig, target: DecoderConfig) -> tuple[list[int], list[int]] | None:
    """Place the source's layers where the target's differ in window or rotation, evenly where there is a choice.

    Returns:
        The source of each layer, and which of them begin as identities; None where all layers are alike, or where the
        source's do not stand in the target in their order.
    """
    old, new = _kinds(config), _kinds(target)
    if len({*old, *new}) == 1:
        return None
    latest: list[int] = []
    for kind in reversed(old):
        end = latest[-1] if latest else len(new)
        fits = [i for i in range(end) if new[i] == kind]
        if not fits:
            return None
        latest.append(fits[-1])
    kept: list[int] = []
    for layer, last in enumerate(reversed(latest)):
        first = kept[-1] + 1 if kept else 0
        fits = [i for i in range(first, last + 1) if new[i] == old[layer]]
        even = layer * len(new) // len(old)
        kept.append(next((i for i in fits if i >= even), fits[-1]))
    layers = [_nearest(old, kept, i, kind) for i, kind in enumerate(new)]
    return layers, [i for i in range(len(new)) if i not in kept]


def _kinds(config: DecoderConfig) -> list[tuple[bool, ...]]:
    """Return what sets each layer apart."""
    patterns = [spread(getattr(canonical(config), name), config.num_layers) for name in _BY_LAYER]
    return list(zip(*patterns, strict=True))


def _nearest(old: Sequence[Any], kept: Sequence[int], place: int, kind: Any) -> int:
    """Return the source layer of a kind that stands nearest to a place in the target, the one before first."""
    alike = [layer for layer in range(len(old)) if old[layer] == kind] or list(range(len(old)))
    return min(alike, key=lambda layer: (abs(kept[layer] - place), kept[layer] > place))


def _grow_experts(grow: Callable[..., None], target: DecoderConfig, slices: int) -> None:
    moe = target.moe
    grow(
        "upcycle", num_experts=moe.num_experts // slices, experts_per_token=moe.experts_per_token // slices,
        granularity=slices, normalize=moe.normalize, balance_loss=moe.balance_loss, z_loss=moe.z_loss,
    )  # fmt: skip


def _check_reached(start: DecoderConfig, found: DecoderConfig, target: DecoderConfig) -> None:
    """Refuse what the steps do not reach after all, such as a shared expert that does not grow in proportion."""
    free = {"norm_epsilon", "vocab_rows", "max_positions", "mlp_dim"}
    if found.head_dim > start.head_dim:
        free |= {"rotary_dim", "rope_scaling"}
    old, new = (replace(one, moe=replace(one.moe, mlp_dim=_mlp_dim(one))) for one in map(canonical, (found, target)))
    wrong = [f"{name} {b} ({a} can)" for name, a, b in _differences(old, new, free)]
    if wrong:
        raise ValueError(f"the target cannot be reached: {'; '.join(wrong)}")
