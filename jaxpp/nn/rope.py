"""Rotary position embeddings, in the rotate-half convention of Hugging Face checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

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
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequencies
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
