"""What the ladder residual is for: no product of a branch waits for the all-reduce of the branch before it.

Compiled for two devices of axis ``tensor``, with layers one by one and without the pass that merges all-reduces.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp.models import DecoderConfig
from jaxpp.parallel import Plan, executing
from jaxpp.train.programs import make_program
from tests.contract.dependencies import Dependencies

LAYERS = 3
APART = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


@functools.cache
def lowered(num_ladder: int, what: str = "forward") -> Any:
    config = DecoderConfig(
        64, LAYERS, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, ladder_layers=num_ladder
    )  # fmt: skip
    program = make_program(config, optax.sgd(0.1), Plan("tensor:2", layers="unroll"), devices=jax.devices()[:2])
    like, place = program.abstract_state, program.layout.batch_sharding()
    names = dict.fromkeys(("tokens", "targets", "segments", "positions"), jnp.int32) | {"weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((2, 8), dtype, sharding=place) for name, dtype in names.items()}
    if what == "gradients":
        return program.loss_and_gradients.lower(like, batch)
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))

    def forward(params: Any, other: Any, batch: Any) -> jax.Array:
        with executing(program.plan.execution(program.layout)):
            model = nnx.merge(graph, params, other)
            return model.run(model.embed(batch), batch)

    return jax.jit(forward).lower(like.params, like.other, batch)


@functools.cache
def forward(num_ladder: int) -> Dependencies:
    return Dependencies(lowered(num_ladder).compile(compiler_options=APART).as_text())


def waits_for_the_one_before(found: Dependencies, distance: int = 1) -> list[bool]:
    """Say of each branch, from the second on, whether a product of it waits for the all-reduce so many before."""
    reduces, branches = found.all_reduces[1:], found.branches()[1:]  # the first all-reduce is the embedding's
    pairs = zip(reduces, branches[distance:], strict=False)
    return [any(found.waits(product, reduce) for product in branch) for reduce, branch in pairs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ladder", [0, LAYERS])
def test_there_are_two_all_reduces_a_layer_whatever_the_wiring(num_ladder):
    found = forward(num_ladder)
    assert len(found.all_reduces) == 1 + 2 * LAYERS
    sizes = [len(branch) for branch in found.branches()[1:]]
    assert len(found.products) == sum(sizes) and min(sizes) > 0
    assert all(attention > mlp for attention, mlp in zip(sizes[::2], sizes[1::2], strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ladder", "waits"),
    [(0, [True] * 5), (1, [True, True, True, False, False]), (2, [True] + [False] * 4), (LAYERS, [False] * 5)],
)
def test_on_the_ladder_no_product_waits_for_the_all_reduce_before_it(num_ladder, waits):
    """Branches are attention, mlp, attention ... of three layers; it is the last layers that do not wait."""
    found = forward(num_ladder)
    assert waits_for_the_one_before(found) == waits
    assert waits_for_the_one_before(found, distance=2) == [True] * 4


@pytest.mark.timeout(300)
def test_the_combiner_merges_what_does_not_wait():
    """Why it is turned off: with it, the two all-reduces of a layer are one again, and both late."""
    merged = Dependencies(lowered(LAYERS).compile().as_text())
    assert len(merged.all_reduces) < 1 + 2 * LAYERS
    assert len(Dependencies(lowered(0).compile().as_text()).all_reduces) == 1 + 2 * LAYERS


@pytest.mark.timeout(300)
def test_the_backward_pass_reduces_as_often_as_that_of_the_standard_wiring():
    counts = [
        len(Dependencies(lowered(k, "gradients").compile(compiler_options=APART).as_text()).all_reduces)
        for k in (0, LAYERS)
    ]
    assert counts[0] == counts[1] > 4 * LAYERS
