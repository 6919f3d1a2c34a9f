"""Advanced knowledge initialisation: new units take the weights of the layer above, so that they are no copies.

Does not preserve the function; copies have nothing that must separate them first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.grow.leaf import ByDims
from jaxpp.grow.spread import Spread
from jaxpp.grow.step import Step, is_norm
from jaxpp.grow.width import net2net
from jaxpp.models import DecoderConfig


def aki(
    config: DecoderConfig,
    *,
    embed_dim: int = 0,
    width: float = 0,
    noise_db: float | None = None,
    seed: int = 0,
) -> Step:
    """Widen stream and mlp as `net2net` does, with new units of layer l from layer l + 1; the last from itself.

    What is read is divided over the copies as there. Norms, table and head are grown as there too.

    Args:
        config: of the model.
        embed_dim: the new width, at least the old one; the mlp grows in proportion.
        width: the same as a multiple of the old one.
        noise_db: signal over noise; None: none, as units are no copies of one another but in the last layer.
        seed: of draws and noise.

    Raises:
        ValueError: a smaller width.

    Source: Chen et al., bert2BERT: Towards Reusable Pretrained Language Models, 2022, section 3.3 (AKI).
    """
    step = net2net(config, embed_dim=embed_dim, width=width, noise_db=noise_db, seed=seed)
    above = {
        path: _FromAbove.of(leaf) for path, leaf in step.leaves.items() if isinstance(leaf, ByDims) and _moves(leaf)
    }
    gap = "new units of layer l hold the weights of layer l + 1" if above and config.num_layers > 1 else step.gap
    return replace(step, name="aki", leaves={**step.leaves, **above}, gap=gap)


def _moves(leaf: ByDims) -> bool:
    return leaf.path.startswith("blocks/") and not is_norm(leaf.path) and bool(_wider(leaf))


def _wider(leaf: ByDims) -> list[int]:
    """Return the written axes that grow."""
    first = len(leaf.arrow.stacked) + len(leaf.arrow.reads)
    return [axis for axis in range(first, len(leaf.spreads)) if not leaf.spreads[axis].is_identity]


@dataclass(frozen=True, eq=False)
class _FromAbove:
    """Old units from the layer itself, new ones from the layer above."""

    own: ByDims
    above: ByDims

    @classmethod
    def of(cls, leaf: ByDims) -> _FromAbove:
        """Grow each layer as `leaf` does, and once more from the layer above it."""
        num_layers = leaf.spreads[0].old
        shifted = Spread(num_layers, np.minimum(np.arange(num_layers) + 1, num_layers - 1))
        return cls(leaf, replace(leaf, spreads=(shifted, *leaf.spreads[1:])))

    @property
    def source(self) -> str:
        return self.own.source

    def _join(self, own: jax.Array, above: jax.Array) -> jax.Array:
        """Take units beyond the old ones, which stand first, from above."""
        for axis in _wider(self.own):
            unit = jax.lax.broadcasted_iota(jnp.int32, own.shape, axis)
            own = jnp.where(unit < self.own.spreads[axis].old, own, above)
        return own

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self._join(self.own.weight(x, dtype), self.above.weight(x, dtype))

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        return self._join(self.own.moment(x, power), self.above.moment(x, power))

    def rate(self) -> float:
        return self.own.rate()
