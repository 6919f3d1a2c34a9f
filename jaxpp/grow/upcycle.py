"""From one mlp to a mixture of experts, each a copy of it (or of a slice of it).

While all experts are copies it does not matter which a token visits, as long as the weights of the chosen ones sum
to 1: softmax, top k, renormalised. With G slices, expert ``c G + g`` is slice g of copy c; the router's columns are
equal in each copy, so that its slices are chosen together, each with a G-th of the copy's weight, which ``down`` times
G undoes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.grow import noise
from jaxpp.grow.leaf import Leaf
from jaxpp.grow.step import Step, by_dims
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig

ROUTER_DEVIATION = 0.02


def upcycle(
    config: DecoderConfig,
    *,
    num_experts: int,
    experts_per_token: int = 2,
    granularity: int = 1,
    reinitialize: float = 0.0,
    balance_loss: float = 1e-2,
    z_loss: float = 1e-3,
    normalize: bool = True,
    exact: bool = True,
    seed: int = 0,
) -> Step:
    """Put experts, copies of the mlp, in its place, behind a router drawn at random.

    Moments: an expert sees ``k / E`` of the tokens with a mean weight of ``1 / k``, so that its expected gradient is an
    E-th of the mlp's: ``m / E`` and ``v / E^2``. Its gradients are noisier, so this v is a lower bound. The router has
    none.

    Args:
        config: of the model, with a gated mlp without bias.
        num_experts: copies of the mlp.
        experts_per_token: how many copies a token visits.
        granularity: experts that each copy is sliced into; both numbers above count times as many.
        reinitialize: fraction of the hidden units of each expert that is drawn anew (drop-upcycling); does not
            preserve the function.
        balance_loss: weight of the load-balance loss in the gradient.
        z_loss: weight of the router's z-loss in the gradient.
        normalize: make the weights of the chosen experts sum to 1. Without it the output is multiplied by
            ``num_experts / experts_per_token``, right in the mean for an even router, and never exact.
        exact: refuse gates that break exactness.
        seed: of the router, and of what is drawn anew.

    Raises:
        ValueError: a mixture already, an mlp that experts are not, gates that break exactness, numbers that do not fit.

    Source: Komatsuzaki et al., Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints, 2023; He et al.,
        Upcycling Large Language Models into Mixture of Experts, 2024 (granular); Nakamura et al., Drop-Upcycling, 2025.
    """
    _check(config, num_experts, experts_per_token, granularity, reinitialize)
    gates = "" if normalize or experts_per_token == num_experts else "the weights of the chosen experts do not sum to 1"
    if gates and exact:
        raise ValueError(
            f"normalize false with {experts_per_token} of {num_experts} experts: gates that break exactness, as "
            f"{gates}; set normalize true, or exact false if that is what you want"
        )
    moe = MoeConfig(
        num_experts * granularity, experts_per_token * granularity, config.mlp_dim // granularity,
        normalize=normalize, balance_loss=balance_loss, z_loss=z_loss,
    )  # fmt: skip
    drawn = f"{reinitialize:.0%} of the hidden units of each expert are drawn anew" if reinitialize else ""
    scale = num_experts / experts_per_token if gates else 1.0
    words = {"experts": f"1 x {moe.num_experts} = {moe.num_experts}"}
    if granularity > 1:
        words["mlp"] = f"{config.mlp_dim} / {granularity} = {moe.mlp_dim}"
    leaves = _leaves(config, num_experts, granularity, reinitialize, scale, seed)
    gap = "; ".join(filter(None, (gates, drawn)))
    return Step("upcycle", config, replace(config, moe=moe), leaves, words, gap)


def _check(
    config: DecoderConfig, num_experts: int, experts_per_token: int, granularity: int, reinitialize: float
) -> None:
    """Refuse what cannot become a mixture of experts of ours."""
    if config.moe.num_experts:
        raise ValueError(f"upcycle: this model has {config.moe.num_experts} experts already; a dense one is needed")
    if config.mlp != "gated" or config.mlp_bias:
        found = f"{config.mlp}{' with biases' if config.mlp_bias else ''}"
        raise ValueError(f"upcycle: this model's mlp is {found}; experts are gated and have no biases")
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(f"{experts_per_token} experts for each token: 1 to num_experts = {num_experts} are needed")
    if granularity < 1 or config.mlp_dim % granularity:
        fits = [n for n in range(1, config.mlp_dim + 1) if config.mlp_dim % n == 0]
        near = sorted(fits, key=lambda n: abs(n - granularity))[:2]
        raise ValueError(
            f"granularity {granularity} does not divide mlp_dim {config.mlp_dim}; {' or '.join(map(str, near))} does"
        )
    if not 0 <= reinitialize <= 1:
        raise ValueError(f"reinitialize {reinitialize:g}: a fraction of the hidden units is needed, 0 to 1, often 0.5")


def _leaves(
    config: DecoderConfig, copies: int, slices: int, redrawn: float, scale: float, seed: int
) -> dict[str, Leaf]:
    """Leave all but the mlp as it is."""
    rest = by_dims("upcycle", config, config, {}).leaves
    leaves: dict[str, Leaf] = {path: leaf for path, leaf in rest.items() if not path.startswith("blocks/mlp/")}
    for name, axis in (("gate", 2), ("up", 2), ("down", 1)):
        factor = slices * scale if name == "down" else 1.0
        leaf = _Expert(f"blocks/mlp/{name}/kernel", copies, slices, axis, factor, redrawn, seed)
        leaves[f"blocks/mlp/experts/{name}"] = leaf
    norm = "mlp_post_norm" if config.norm_place == "post" else "mlp_norm"
    leaves["blocks/mlp/router/kernel"] = _Router(f"blocks/{norm}/scale", copies, slices, seed)
    return leaves


@dataclass(frozen=True, eq=False)
class _Expert:
    """Weights of all experts: copies of the mlp's, cut into slices of hidden units.

    Args:
        source: path of the mlp's weight, ``[layers, reads, writes]``.
        copies: of the mlp.
        slices: of each copy.
        axis: of the hidden units in the source.
        factor: on the weight.
        redrawn: fraction of the hidden units that is drawn anew.
        seed: of these draws.
    """

    source: str
    copies: int
    slices: int
    axis: int
    factor: float
    redrawn: float
    seed: int

    def _cut(self, x: jax.Array) -> jax.Array:
        """Return ``[layers, copies x slices, reads, writes]``."""
        shape = (*x.shape[: self.axis], self.slices, -1, *x.shape[self.axis + 1 :])
        sliced = jnp.moveaxis(x.reshape(shape), self.axis, 1)
        wide = jnp.broadcast_to(sliced[:, None], (x.shape[0], self.copies, *sliced.shape[1:]))
        return wide.reshape(x.shape[0], self.copies * self.slices, *sliced.shape[2:])

    def _is_redrawn(self, shape: tuple[int, ...]) -> jax.Array:
        """Choose hidden units, as many in each expert and the same in its three weights."""
        units = (*shape[:2], shape[self.axis + 1])
        drawn = noise.integers(noise.key_of("blocks/mlp/experts units", self.seed), units)
        rank = jnp.argsort(jnp.argsort(drawn, -1), -1)
        return jnp.expand_dims(rank < round(self.redrawn * units[-1]), 4 - self.axis)

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * self.factor
        y = self._cut(wide)
        if self.redrawn:
            size = noise.root_mean_square(wide, 1)
            drawn = noise.scaled(noise.integers(noise.key_of(f"{self.source} experts", self.seed), y.shape), size)
            y = jnp.where(self._is_redrawn(y.shape), drawn, y)
        return y.astype(dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        y = self._cut(x) * (self.factor * self.copies) ** -power
        return jnp.where(self._is_redrawn(y.shape), 0, y) if self.redrawn and power == 1 else y

    def rate(self) -> float:
        return self.factor


@dataclass(frozen=True, eq=False)
class _Router:
    """A router drawn from a normal, with equal columns for the slices of a copy.

    Args:
        source: path of a weight ``[layers, embed]``, of which the shape is taken and nothing else.
        copies: of the mlp.
        slices: of each copy.
        seed: of the draw.
    """

    source: str
    copies: int
    slices: int
    seed: int

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        copy = np.arange(self.copies * self.slices) // self.slices
        drawn = noise.integers(noise.key_of("blocks/mlp/router/kernel", self.seed), (*x.shape, copy.size), {2: copy})
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return noise.scaled(drawn, jnp.asarray(ROUTER_DEVIATION, wide)).astype(dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        return jnp.zeros((*x.shape, self.copies * self.slices), x.dtype)

    def rate(self) -> float:
        return 1.0
