"""Mixture of experts: a router sends each token to a few of many mlps.

Letters: B batch, T seq, M embed, N tokens of this device, K experts per token, S slots (K x N), E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpp import dims
from jaxpp.nn.dispatch import arrived, tile_rows, to_capacity, to_shards, to_tiles
from jaxpp.nn.linear import Linear
from jaxpp.nn.mlp import ACTIVATIONS, Activation, Mlp
from jaxpp.nn.router import RouterSums, Routing, balance_loss, route, router_sums, with_gradient_of, z_loss
from jaxpp.parallel import PRODUCT, in_use
from jaxpp.parallel.expert import Spread, expert_spread
from jaxpp.parallel.grouped import Tiles, grouped_product
from jaxpp.parallel.local import with_collectives
from jaxpp.parallel.product import arrow_of, stored

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


@dataclass(frozen=True)
class MoeConfig:
    """Shape and options of a mixture of experts."""

    num_experts: int = 0  # 0: no mixture, one mlp for all tokens
    experts_per_token: int = 2
    mlp_dim: int = 0  # width of each expert; 0: the decoder's mlp_dim
    shared_mlp_dim: int = 0  # width of an expert that every token visits besides; 0: none
    shared_gate: bool = False  # multiply the shared expert's output by sigmoid(gate x)
    normalize: bool = True  # make the weights of a token's chosen experts sum to 1
    capacity_factor: float = 0.0  # tokens an expert takes, over an even share; 0: all that come (dropless)
    balance_loss: float = 0.0  # weight of the load-balance loss in the gradient
    z_loss: float = 0.0  # weight of the router's z-loss in the gradient

    def __post_init__(self) -> None:
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            most, given = self.num_experts, self.experts_per_token
            raise ValueError(f"model.moe.experts_per_token = {given}: 1 to num_experts = {most} are needed")
        for name in ("num_experts", "mlp_dim", "shared_mlp_dim", "capacity_factor", "balance_loss", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.moe.{name} = {getattr(self, name)}: 0 or more are needed")
        if self.shared_gate and not self.shared_mlp_dim:
            raise ValueError("model.moe.shared_gate needs a shared expert; set shared_mlp_dim, or shared_gate false")


class Experts(nnx.Module):
    """The weights of all experts, stacked over dim ``experts``."""

    def __init__(self, key: jax.Array, num_experts: int, embed_dim: int, mlp_dim: int, out_scale: float):
        """Draw three weights per expert; `out_scale` multiplies the deviation of the last."""
        sizes = {"experts": num_experts, "embed": embed_dim, "mlp": mlp_dim}
        keys = jax.random.split(key, 3)
        self.gate = dims.normal(keys[0], "experts | embed -> mlp", sizes)
        self.up = dims.normal(keys[1], "experts | embed -> mlp", sizes)
        self.down = dims.normal(keys[2], "experts | mlp -> embed", sizes, out_scale)


class Moe(nnx.Module):
    """``sum over the chosen experts of weight x down(act(gate x) * up x)``, plus a shared expert if there is one.

    Dropless unless a capacity is set. Tokens are sorted by expert; the products are grouped by expert. On a mesh each
    device routes its own tokens; where the experts are split, rows travel to them and back (`jaxpp.parallel.expert`).
    With a capacity factor c each expert takes at most ``ceil(c x tokens x k / experts)`` tokens of each batch shard,
    first choices before second and earlier tokens before later; what is dropped contributes zero.

    Cost: per layer and microbatch, besides the exchange of `Expert` and the gathers of `Fsdp`: over the axes that split
        mlp, one all-reduce of ``batch x seq x embed`` in the forward pass, and in the backward pass one of the same and
        one of ``batch x seq x k``; the router's weights are gathered and their gradient all-reduced over the batch
        axes; with auxiliary losses, one all-reduce of ``2 x experts + 2`` numbers. A shared expert adds an `Mlp`'s.

    Source: Shazeer et al., Outrageously Large Neural Networks, 2017; Gale, Narayanan, Young, Zaharia, MegaBlocks, 2022
        (dropless); Lepikhin et al., GShard, 2020 (capacity).
    """

    def __init__(
        self,
        key: jax.Array,
        config: MoeConfig,
        embed_dim: int,
        mlp_dim: int,
        *,
        activation: Activation = "silu",
        out_scale: float = 1.0,
    ):
        """Draw router, experts and shared expert.

        Args:
            key: PRNG key.
            config: shape and options.
            embed_dim: width of the residual stream.
            mlp_dim: width of each expert where `config` leaves it open.
            activation: of the gate.
            out_scale: factor on the deviation of the weights that write to the residual stream.
        """
        self.config = replace(config, mlp_dim=config.mlp_dim or mlp_dim)
        self.activation = activation
        keys = jax.random.split(key, 4)
        sizes = {"embed": embed_dim, "experts": config.num_experts}
        self.router = Linear(keys[0], "embed -> experts", sizes)
        self.router.kernel.set_metadata(wide=True)  # rounded to bfloat16 it would send tokens elsewhere
        self.experts = Experts(keys[1], config.num_experts, embed_dim, self.config.mlp_dim, out_scale)
        shared = {"kind": "gated", "activation": activation, "out_scale": out_scale}
        self.shared = Mlp(keys[2], embed_dim, config.shared_mlp_dim, **shared) if config.shared_mlp_dim else None
        self.shared_gate = Linear(keys[3], "embed ->", sizes) if config.shared_gate else None

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        *,
        real: Bool[Array, "batch seq"] | None = None,
        loss_weight: Float[Array, ""] | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """Apply the layer to each token.

        Args:
            x: the tokens.
            real: False for padding, which takes no capacity and does not count in the auxiliary losses; None: all real.
            loss_weight: what the training loss, a sum, is divided by afterwards; the auxiliary losses, means over
                tokens, are multiplied by it and join the gradient (not the value). None: no auxiliary losses.

        Raises:
            ValueError: batch or mlp does not divide over its axes.
        """
        y, sums = self._routed(x, jnp.ones(x.shape[:2], bool) if real is None else real)
        if self.shared is not None:
            y = y + self._shared_expert(x, self.shared)
        if loss_weight is None or not (self.config.balance_loss or self.config.z_loss):
            return y
        auxiliary = self.config.balance_loss * balance_loss(sums) + self.config.z_loss * z_loss(sums)
        return with_gradient_of(y, auxiliary * jax.lax.stop_gradient(loss_weight))

    def _routed(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, RouterSums]:
        spread = expert_spread((*x.shape[:2], self.config.mlp_dim))
        weights = (self.experts.gate, self.experts.up, self.experts.down)
        places = [arrow_of(weight).dims for weight in weights]
        kernels = [stored(weight).astype(x.dtype) for weight in weights]
        local = _Local(self.config, spread, ACTIVATIONS[self.activation], tuple(map(tuple, places)))
        tokens = spread.activation()
        return with_collectives(
            local,
            (x, real, self.router.kernel.get_value(), *kernels),
            (tokens, tokens, PartitionSpec(), *map(spread.split, kernels, places)),
            (tokens, PartitionSpec()),
        )

    def _shared_expert(self, x: jax.Array, shared: Mlp) -> jax.Array:
        y = shared(x)
        if self.shared_gate is None:
            return y
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kernel = in_use(self.shared_gate.kernel).astype(wide)
        gate = jax.nn.sigmoid((x.astype(wide) * kernel).sum(-1, keepdims=True))
        return (y * gate).astype(x.dtype)


Rows = Callable[[jax.Array, Tiles | None], jax.Array]
"""Tiles ``[tiles, rows, embed]`` (whose: None, one per expert) to the experts' outputs, of the same shape."""


@dataclass(frozen=True)
class _Local:
    """What one device does with its own tokens; the collectives are those of `spread`."""

    config: MoeConfig
    spread: Spread
    act: Callable[[jax.Array], jax.Array]
    places: tuple[tuple[str, ...], ...]

    def __call__(
        self, x_BTM: jax.Array, real_BT: jax.Array, router_ME: jax.Array, *kernels: jax.Array
    ) -> tuple[jax.Array, RouterSums]:
        """Return the routed experts' sum for each token, and the router's sums over all devices' tokens."""
        x_NM, real_N = x_BTM.reshape(-1, x_BTM.shape[-1]), real_BT.reshape(-1)
        k = self.config.experts_per_token
        routing = route(x_NM, router_ME, k, self.config.normalize)
        y_SM = self._visit(self.spread.enter(x_NM), routing, real_N, partial(self._mlp, kernels))
        weights_KN = self.spread.enter(routing.weights.T)
        y_KNM = y_SM.reshape(k, *x_NM.shape).astype(weights_KN.dtype) * weights_KN[..., None]
        y_NM = self.spread.leave(y_KNM.sum(0).astype(x_NM.dtype))
        return y_NM.reshape(x_BTM.shape), jax.tree.map(self.spread.total, router_sums(routing, real_N))

    def _mlp(self, kernels: Sequence[jax.Array], rows: jax.Array, tiles: Tiles | None) -> jax.Array:
        def product(x: jax.Array, i: int) -> jax.Array:
            return checkpoint_name(grouped_product(x, kernels[i], tiles, self.spread.use(self.places[i])), PRODUCT)

        return product(self.act(product(rows, 0)) * product(rows, 1), 2)

    def _visit(self, x_NM: jax.Array, routing: Routing, real_N: jax.Array, experts: Rows) -> jax.Array:
        """Return what the expert of each slot makes of its token, ``[slots, embed]``."""
        k, num_experts, num_shards = self.config.experts_per_token, self.config.num_experts, self.spread.num_shards
        ids_S, num_tokens = routing.chosen.T.reshape(-1), x_NM.shape[0]
        if self.config.capacity_factor:
            capacity = math.ceil(self.config.capacity_factor * num_tokens * k / num_experts)
            move = to_capacity(ids_S, jnp.tile(real_N, k), num_experts, min(capacity, num_tokens))
            return move.back(self._at_capacity(move(x_NM), experts))
        num_here = num_experts // num_shards
        tile = tile_rows(ids_S.size, num_here)
        if num_shards == 1:
            return _tiled(x_NM, ids_S, num_experts, tile, experts)
        rows = num_tokens * min(k, num_here)
        move, counts = to_shards(ids_S, num_experts, num_shards, rows)
        came = self.spread.exchange(move(x_NM).reshape(num_shards, rows, -1))
        ids = arrived(self.spread.arriving(counts), rows)
        y = _tiled(came.reshape(-1, x_NM.shape[1]), ids, num_here, tile, experts)
        return move.back(self.spread.exchange(y.reshape(came.shape)).reshape(-1, x_NM.shape[1]))

    def _at_capacity(self, rows: jax.Array, experts: Rows) -> jax.Array:
        """Send ``[experts x capacity, embed]`` to the experts and take their outputs back, in the same order."""
        num_shards, num_here = self.spread.num_shards, self.config.num_experts // self.spread.num_shards
        came = self.spread.exchange(rows.reshape(num_shards, num_here, -1, rows.shape[1])).swapaxes(0, 1)
        y = experts(came.reshape(num_here, -1, rows.shape[1]), None).reshape(came.shape)
        return self.spread.exchange(y.swapaxes(0, 1)).reshape(rows.shape)


def _tiled(x: jax.Array, ids: jax.Array, num_experts: int, tile: int, experts: Rows) -> jax.Array:
    """Run `experts` on rows of the given ids (`num_experts` for an empty row), sorted and padded into tiles."""
    move, tiles = to_tiles(ids, num_experts, tile)
    y = experts(move(x).reshape(-1, tile, x.shape[1]), tiles)
    return move.back(y.reshape(-1, x.shape[1]))
