"""Growth in any dim at once, by new units and layers that are drawn at random and masked until training lets them in.

The old weights stay in the leading places. The target computes the source's function at the start of the ramp
(`jaxpp.train.ramp`), which the run that trains it must be given: `ramp_settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import dims, tree
from jaxpp.grow import noise
from jaxpp.grow.step import Step, is_norm, scale_offset
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import abstract_params

GAP = "new units count from the start unless the run has the ramp that lets them in (train.ramp)"


@dataclass(frozen=True, eq=False)
class Masked(Step):
    """A `Step` whose new units come in by a ramp.

    Args:
        ramp_steps: updates over which they do.
    """

    ramp_steps: int = 1000


@dataclass(frozen=True, eq=False)
class Padded:
    """A weight with new entries behind the old ones, on every axis that grows.

    Args:
        path: of the weight in the target; what is new is drawn by it.
        source: its path in the source.
        shape: in the target.
        start: of new entries; None: drawn.
        deviation: standard deviation of what is drawn.
        seed: of the draws.
    """

    path: str
    source: str
    shape: tuple[int, ...]
    start: float | None = None
    deviation: float = 0.02
    seed: int = 0

    def _pad(self, x: jax.Array, value: float) -> jax.Array:
        behind = [(0, new - old) for new, old in zip(self.shape, x.shape, strict=True)]
        return jnp.pad(x, behind, constant_values=value)

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the new weight."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = self._pad(wide, self.start or 0.0)
        if self.start is None and self.shape != x.shape:
            drawn = noise.integers(noise.key_of(f"{self.path} new", self.seed), self.shape)
            places = (jax.lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in range(len(self.shape)))
            is_old = [place < size for place, size in zip(places, x.shape, strict=True)]
            scaled = noise.scaled(drawn, jnp.asarray(self.deviation, wide.dtype))
            y = jnp.where(jnp.stack(is_old).all(0), y, scaled)
        return y.astype(dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        """Return the new moment: that of the old entries, as their gradients stay, and zero for the new."""
        return self._pad(x, 0.0)

    def rate(self) -> float:
        """Return 1: old weights move as they did."""
        return 1.0


def masked(
    config: DecoderConfig,
    *,
    embed_dim: int = 0,
    mlp_dim: int = 0,
    num_heads: int = 0,
    num_layers: int = 0,
    ramp_steps: int = 1000,
    deviation: float = 0.02,
    seed: int = 0,
) -> Masked:
    """Add units of the stream, of the mlp, heads and layers, drawn at random; a ramp lets them in (MSG).

    Norms get an epsilon less by ``D / D'``, for D units of the stream before and D' after. Heads come in whole groups
    with their key and value, but where a single key serves all.

    Args:
        config: of the model.
        embed_dim: the new width of the stream; 0: as it is; so with the others.
        mlp_dim: the new width of the mlp, or of each expert.
        num_heads: the new number of heads.
        num_layers: the new number of layers; they stand behind the old ones.
        ramp_steps: updates over which the mask rises from 0 to 1.
        deviation: standard deviation of new weights; new biases are 0, new scales of norms 1.
        seed: of the new weights.

    Raises:
        ValueError: a smaller size, nothing that grows, no ramp, heads that do not form whole groups; a wider stream
            with layer norms, more heads behind a norm over all of them, a wider expert beside a shared one of another
            width: no mask leaves these as they were.

    Source: Yao, Zhang, Li, Wang, Masked Structural Growth for 2x Faster Language Model Pre-training, 2024, section 3.
    """
    target = _target(config, embed_dim, mlp_dim, num_heads, num_layers)
    before, after = _sizes(config), _sizes(target)
    words = {dim: f"{size} -> {after[dim]}" for dim, size in before.items() if size != after[dim]}
    if not words or ramp_steps < 1:
        given = f"ramp_steps {ramp_steps}: 1 or more are needed" if words else "nothing grows: name a larger size"
        raise ValueError(f"msg: {given}")
    leaves = {}
    for path, node in tree.named_nodes(abstract_params(target)).items():
        start = None if dims.of(node, path).reads else 0.0
        if is_norm(path) and path.endswith("/scale"):
            start = 1.0 - scale_offset(config)
        leaves[path] = Padded(path, path, tuple(node.shape), start, deviation, seed)
    return Masked("msg", config, target, leaves, words, GAP, ramp_steps=ramp_steps)


def ramp_settings(step: Masked) -> dict[str, Any]:
    """Return the section ``train.ramp`` of the run that trains the target from its first update on."""
    before, after = _sizes(step.source), _sizes(step.target)
    return {"dims": {d: size for d, size in before.items() if size != after[d]}, "num_steps": step.ramp_steps}


def _sizes(config: DecoderConfig) -> dict[str, int]:
    """Return the size of each dim that may grow."""
    return dict(
        embed=config.embed_dim, mlp=_mlp_dim(config), heads=config.num_heads, kv_heads=config.num_kv_heads,
        layers=config.num_layers,
    )  # fmt: skip


def _mlp_dim(config: DecoderConfig) -> int:
    return (config.moe.mlp_dim if config.moe.num_experts else 0) or config.mlp_dim


def _target(config: DecoderConfig, embed_dim: int, mlp_dim: int, num_heads: int, num_layers: int) -> DecoderConfig:
    sizes = dict(
        embed_dim=(config.embed_dim, embed_dim), mlp_dim=(_mlp_dim(config), mlp_dim),
        num_heads=(config.num_heads, num_heads), num_layers=(config.num_layers, num_layers),
    )  # fmt: skip
    for name, (old, size) in sizes.items():
        if size and size < old:
            raise ValueError(f"msg: {name} {size}: {old} or more are needed, models only grow")
    new: dict[str, Any] = {name: size for name, (old, size) in sizes.items() if size > old}
    if "embed_dim" in new:
        if config.norm == "layer":
            raise ValueError(
                "msg: layer norms subtract a mean over all units of the stream, new ones too, which no mask on weights "
                "mends; lemon widens such a model, and heads, mlp_dim and num_layers can grow here"
            )
        new |= dict(norm_epsilon=config.norm_epsilon * config.embed_dim / embed_dim, head_dim=config.head_dim)
    if "num_heads" in new:
        new |= dict(num_kv_heads=_kv_heads(config, num_heads), head_dim=config.head_dim)
    if "num_layers" in new and config.ladder_layers:  # the new ones stand behind those on the ladder
        new["ladder_layers"] = config.ladder_layers + num_layers - config.num_layers
    if "mlp_dim" in new and config.moe.num_experts:
        new["moe"] = replace(config.moe, mlp_dim=_experts_dim(config, new.pop("mlp_dim")))
    return replace(config, **new)


def _kv_heads(config: DecoderConfig, num_heads: int) -> int:
    group = config.num_heads // config.num_kv_heads
    if config.qk_norm == "full":
        raise ValueError(
            f"msg: {num_heads} heads: this model's norm of queries and keys is over all heads, and would count the new "
            "ones from the start; the operator heads copies all of them"
        )
    if config.num_kv_heads == 1:
        return 1
    if num_heads % group:
        near = [num_heads - num_heads % group, num_heads - num_heads % group + group]
        raise ValueError(
            f"msg: {num_heads} heads: {config.num_heads} heads in groups of {group} grow by whole groups; "
            f"{' or '.join(str(n) for n in near if n > config.num_heads)} would do"
        )
    return num_heads // group


def _experts_dim(config: DecoderConfig, mlp_dim: int) -> int:
    if shared := config.moe.shared_mlp_dim:
        raise ValueError(
            f"msg: mlp_dim {mlp_dim}: a shared expert of width {shared} stays beside the wider ones, and one size "
            "before could not tell what is new in both; the operator mlp widens them together"
        )
    return mlp_dim
