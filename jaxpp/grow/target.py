"""From a model to the sizes of another: which operators lead there, or which dim cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpp.grow.operators import OPERATORS
from jaxpp.grow.step import Step
from jaxpp.models import FAMILIES, DecoderConfig
from jaxpp.models.canonical import canonical
from jaxpp.names import unknown

FAMILY = (
    "norm", "norm_scale", "norm_place", "parallel", "positions", "mlp", "activation", "qk_norm", "qkv_bias", "out_bias",
    "mlp_bias", "embed_scale", "attention_soft_cap", "logit_soft_cap",
)  # fmt: skip
"""What growth cannot change. Not named: what stays as the source has it (ties, positions, windows, epsilon)."""

SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size", "num_layers")


def preset(name: str) -> DecoderConfig:
    """Return the config of a preset of any family.

    Raises:
        ValueError: there is none of that name; the nearest is named.
    """
    found: dict[str, tuple[type, Mapping[str, Any]]] = {}
    for cls, sizes in FAMILIES.values():
        found |= {size: (cls, values) for size, values in sizes.items()}
    if name not in found:
        raise ValueError(unknown("target: unknown preset", name, found))
    cls, values = found[name]
    return cls(**values)


def steps_to(
    config: DecoderConfig,
    target: DecoderConfig,
    *,
    noise_db: float | None = 15.0,
    seed: int = 0,
    depth_op: str = "identity",
) -> list[Step]:
    """Return the steps that give a model the sizes of another.

    The stream grows by hypercloning where heads and mlp have whole factors too, else by lemon; then heads, their size,
    mlp, vocabulary, depth and experts follow, each where it differs.

    Args:
        config: of the model.
        target: whose sizes it shall have. Ties, windows, positions and epsilon stay the model's own.
        noise_db: signal over noise; None: none.
        seed: of noise and draws.
        depth_op: operator of the depth.

    Raises:
        ValueError: models of different families; dims that cannot be reached, each with the nearest size that can.
    """
    _check_family(config, target)
    if problems := list(_out_of_reach(config, target)):
        raise ValueError(f"the target cannot be reached: {'; '.join(problems)}")
    found: list[Step] = []

    def add(name: str, **sizes: Any) -> None:
        found.append(OPERATORS[name].make(found[-1].target if found else config, **sizes))

    noisy: dict[str, Any] = dict(noise_db=noise_db)
    if times := _whole_factor(config, target):
        add("hypercloning", width=times, mlp=target.mlp_dim // config.mlp_dim, seed=seed, **noisy)
    elif target.embed_dim != config.embed_dim:
        add("lemon", embed_dim=target.embed_dim, seed=seed)
    heads = (target.num_heads, target.num_kv_heads)
    now = found[-1].target if found else config
    if heads != (now.num_heads, now.num_kv_heads):
        add("heads", num_heads=heads[0], num_kv_heads=heads[1], seed=seed + 1, **noisy)
    if target.head_dim != config.head_dim:
        add("head_dim", head_dim=target.head_dim, seed=seed + 2, **noisy)
    if target.mlp_dim != (found[-1].target if found else config).mlp_dim and not config.moe.num_experts:
        add("mlp", mlp_dim=target.mlp_dim, seed=seed + 3, **noisy)
    if target.vocab_size != config.vocab_size:
        add("vocab", vocab_size=target.vocab_size)
    if target.num_layers != config.num_layers:
        add(depth_op, num_layers=target.num_layers)
    if target.moe.num_experts != config.moe.num_experts:
        moe = target.moe
        add("upcycle", num_experts=moe.num_experts, experts_per_token=moe.experts_per_token, seed=seed + 4)
    return found


def _check_family(config: DecoderConfig, target: DecoderConfig) -> None:
    ours, theirs = canonical(config), canonical(target)
    apart = [f"{name} {getattr(ours, name)} against {getattr(theirs, name)}" for name in FAMILY]
    apart = [line for line, name in zip(apart, FAMILY, strict=True) if getattr(ours, name) != getattr(theirs, name)]
    if apart:
        raise ValueError(f"source and target are of different families: {', '.join(apart)}; growth changes sizes alone")


def _whole_factor(config: DecoderConfig, target: DecoderConfig) -> int:
    """Return the factor of the stream if heads have it too and the mlp a whole one; else 0."""
    times = target.embed_dim // config.embed_dim
    kv_heads = config.num_kv_heads * times if config.num_kv_heads > 1 else 1
    wanted = (times * config.embed_dim, times * config.num_heads, kv_heads, 0)
    found = (target.embed_dim, target.num_heads, target.num_kv_heads, target.mlp_dim % config.mlp_dim)
    return times if times > 1 and wanted == found and not config.moe.num_experts else 0


def _out_of_reach(config: DecoderConfig, target: DecoderConfig) -> Iterator[str]:
    """Yield a phrase for each dim that no operator leads to."""
    for name in SIZES:
        old, new = getattr(config, name), getattr(target, name)
        if new < old:
            yield f"{name} {old} would shrink to {new}, and models only grow (nearest: {old})"
        elif name == "head_dim" and new % old:
            yield f"head_dim {old} grows by whole factors, not to {new} (nearest: {_near(old, new)})"
    group, kv_heads = config.num_heads // config.num_kv_heads, target.num_kv_heads
    if (
        kv_heads >= config.num_kv_heads
        and target.num_heads >= config.num_heads
        and target.num_heads // kv_heads < group
    ):
        yield (
            f"num_heads {target.num_heads} on {kv_heads} kv heads are groups of {target.num_heads // kv_heads}, and "
            f"{group} queries share a key (nearest: {group * kv_heads} heads)"
        )
    yield from _experts_out_of_reach(config, target)


def _experts_out_of_reach(config: DecoderConfig, target: DecoderConfig) -> Iterator[str]:
    if config.moe.num_experts == target.moe.num_experts:
        return
    if config.moe.num_experts:
        yield f"{config.moe.num_experts} experts stay as many, not {target.moe.num_experts}"
    elif target.moe.shared_mlp_dim:
        yield f"a shared expert of {target.moe.shared_mlp_dim} (nearest: none)"
    elif (target.moe.mlp_dim or target.mlp_dim) != target.mlp_dim:
        yield f"experts of {target.moe.mlp_dim} (nearest: {target.mlp_dim}, or --experts with --granularity)"


def _near(old: int, new: int) -> str:
    sizes: Sequence[int] = [old * max(1, new // old), old * (new // old + 1)]
    return " or ".join(map(str, sizes))
