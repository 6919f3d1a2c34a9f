"""Splash attention, the TPU's fused kernel, behind the signature of the other kernels.

Never holds the ``seq x seq`` scores. On a mesh each device runs it on its own rows and heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.parallel import per_shard

BLOCK = 128  # the kernel's smallest tile: seq and head_dim are multiples of it


def splash(
    q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segments_BT: jax.Array | None, interpret: bool = False
) -> jax.Array:
    """Attend causally within each segment.

    Args:
        q_BTHD: queries ``[batch, seq, heads, head_dim]``; seq a multiple of 128.
        k_BTKD: keys ``[batch, seq, kv_heads, head_dim]``.
        v_BTKD: values, as keys.
        segments_BT: document of each token; None: one per row.
        interpret: run the kernel's program on any platform, slowly (for tests).

    Source: Dao, Fu, Ermon, Rudra, Ré, FlashAttention, 2022 (the algorithm); the kernel ships with JAX.
    """
    segments = jnp.zeros(q_BTHD.shape[:2], jnp.int32) if segments_BT is None else segments_BT
    heads, keys = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    local = partial(_local, interpret=interpret)
    return per_shard(local, (q_BTHD, k_BTKD, v_BTKD, segments), (heads, keys, keys, "batch seq"), heads)


def _local(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segments: jax.Array, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (batch, seq, num_heads, head_dim), num_kv_heads = q_BTHD.shape, k_BTKD.shape[2]
    group = num_heads // num_kv_heads
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((seq, seq)) for _ in range(group)])
    kernel = splash_attention_kernel.make_splash_mqa_single_device(mask=mask, interpret=interpret)

    def row(q_KGTD: jax.Array, k_KTD: jax.Array, v_KTD: jax.Array, ids: jax.Array) -> Any:
        same = splash_attention_kernel.SegmentIds(ids, ids)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=same))(q_KGTD, k_KTD, v_KTD)

    scaled = (q_BTHD * head_dim**-0.5).transpose(0, 2, 1, 3).reshape(batch, num_kv_heads, group, seq, head_dim)
    out = jax.vmap(row)(scaled, k_BTKD.transpose(0, 2, 1, 3), v_BTKD.transpose(0, 2, 1, 3), segments)
    return out.reshape(batch, num_heads, seq, head_dim).transpose(0, 2, 1, 3).astype(q_BTHD.dtype)
