"""The TPU's kernel, interpreted on the CPU, against the plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn.splash import splash
from jaxpp.parallel import Plan, executing

ROWS, SEQ, HEADS, KV_HEADS, SIZE = 2, 128, 4, 2, 128


@pytest.mark.parametrize("mesh", ["data:1", "data:2 tensor:2"])
def test_splash_attends_as_the_plain_kernel_does(mesh):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(ROWS, SEQ, n, SIZE)), jnp.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    segments = jnp.asarray(rng.integers(1, 4, (ROWS, SEQ)), jnp.int32).sort(axis=1)
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    plan = Plan(mesh=mesh)
    layout = plan.layout(jax.devices()[: 1 if mesh == "data:1" else 4])

    def fused(q, k, v):
        with executing(plan.execution(layout)):
            return jnp.sum(jnp.sin(splash(q, k, v, segments, interpret=True)))

    def plain(q, k, v):
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)))

    found = jax.jit(jax.value_and_grad(fused, argnums=(0, 1, 2)))(q, k, v)
    wanted = jax.value_and_grad(plain, argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
