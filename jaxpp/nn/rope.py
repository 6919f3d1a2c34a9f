"""Rotary position embeddings, in the rotate-half convention of Hugging Face checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def angles(
    positions: Int[Array, "batch seq"], head_dim: int, base: float
) -> tuple[Float[Array, "batch seq half"], Float[Array, "batch seq half"]]:
    """Return cosine and sine of ``position x base^(-2k / head_dim)``, ``k < head_dim / 2``, in fp32.

    Args:
        positions: of each token in its document, int32.
        head_dim: size of a head, even.
        base: wavelength base, 10,000 in the paper.

    Source: Su, Lu, Pan, Murtadha, Wen, Liu, RoFormer, 2021, section 3.4.2.
    """
    # An fp32 angle is off by 1e-3 at position 40,000. Counted in 2^-32 of a turn, an integer product drops whole turns
    # by itself, exactly; what rounding left of a frequency is added in fp32.
    unit = 2 * np.pi / 2**32
    steps = np.float64(base) ** (-np.arange(0, head_dim, 2) / head_dim) / unit
    whole = np.round(steps)
    turned = positions[..., None].astype(jnp.uint32) * whole.astype(np.uint32)
    left = positions[..., None].astype(jnp.float32) * ((steps - whole) * unit).astype(np.float32)
    angle = jax.lax.bitcast_convert_type(turned, jnp.int32).astype(jnp.float32) * np.float32(unit) + left
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    cosine: Float[Array, "batch seq half"],
    sine: Float[Array, "batch seq half"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate the pairs ``(k, k + head_dim / 2)`` of each head by its token's angle."""
    cosine, sine = cosine[:, :, None].astype(x.dtype), sine[:, :, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
