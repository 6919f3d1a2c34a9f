"""Rotary position embeddings, in the rotate-half convention of Hugging Face checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.nn.scaling import RopeScaling, dynamic_base, scaled_frequencies

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Rotary = tuple[jax.Array, jax.Array]
"""Cosine and sine, each ``[batch, seq, rotary_dim / 2]`` fp32."""


def angles(
    positions: Int[Array, "batch seq"],
    rotary_dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    lengths: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch seq half"], Float[Array, "batch seq half"]]:
    """Return cosine and sine of ``position x base^(-2k / rotary_dim)``, ``k < rotary_dim / 2``, in fp32.

    Args:
        positions: of each token in its document, int32.
        rotary_dim: how many dims of a head are rotated, even.
        base: wavelength base, 10,000 in the paper.
        scaling: how frequencies are stretched. The kinds ``dynamic`` and ``longrope`` depend on the length of a
            sequence.
        lengths: of each row, where it has more tokens than these; by default one more than its largest position.

    Source: Su, Lu, Pan, Murtadha, Wen, Liu, RoFormer, 2021, section 3.4.2.
    """
    scaling = scaling or RopeScaling()
    turned = _turned(positions, scaled_frequencies(rotary_dim, base, scaling))
    if scaling.kind in ("dynamic", "longrope"):
        length = (positions.max(axis=-1) + 1 if lengths is None else lengths)[:, None, None]
        if scaling.kind == "longrope":
            beyond = _turned(positions, scaled_frequencies(rotary_dim, base, scaling, beyond=True))
        else:
            exponents = -np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim
            stretched = dynamic_base(length.astype(jnp.float32), rotary_dim, base, scaling)
            beyond = positions[..., None].astype(jnp.float32) * stretched**exponents
        turned = jnp.where(length > scaling.original_positions, beyond, turned)
    magnitude = np.float32(scaling.own_magnitude())
    return jnp.cos(turned) * magnitude, jnp.sin(turned) * magnitude


def _turned(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Return ``positions x frequencies`` less whole turns, fp32.

    An fp32 angle is off by 1e-3 at position 40,000. Counted in 2^-32 of a turn, an integer product drops whole turns by
    itself, exactly; what rounding left of a frequency is added in fp32.
    """
    unit = 2 * np.pi / 2**32
    steps = frequencies / unit
    whole = np.round(steps)
    turned = positions[..., None].astype(jnp.uint32) * whole.astype(np.uint32)
    left = positions[..., None].astype(jnp.float32) * ((steps - whole) * unit).astype(np.float32)
    return jax.lax.bitcast_convert_type(turned, jnp.int32).astype(jnp.float32) * np.float32(unit) + left


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    cosine: Float[Array, "batch seq half"],
    sine: Float[Array, "batch seq half"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate the pairs ``(k, k + half)`` of each head by its token's angle; dims from ``2 half`` on pass unchanged."""
    half = cosine.shape[-1]
    cosine, sine = cosine[:, :, None].astype(x.dtype), sine[:, :, None].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
