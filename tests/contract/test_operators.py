"""Every growth operator keeps the contract: all weights of the target come from the source, in their shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp import tree
from jaxpp.grow import OPERATORS, Growth
from jaxpp.grow.operators import DEPTH, WIDTH
from jaxpp.grow.width import hypercloning
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import abstract_params

CONFIG = DecoderConfig(
    vocab_size=64, num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, max_positions=32, tied=True
)
SIZES: dict[str, dict[str, Any]] = {
    "hypercloning": dict(width=2),
    "lemon": dict(embed_dim=40),
    "net2net": dict(embed_dim=40),
    "aki": dict(embed_dim=40),
    "msg": dict(embed_dim=40, mlp_dim=64, num_heads=6, num_layers=5),
    "heads": dict(num_heads=6),
    "head_dim": dict(head_dim=16),
    "mlp": dict(mlp_dim=50),
    "vocab": dict(vocab_size=70),
    "identity": dict(num_layers=6),
    "stack": dict(num_layers=6),
    "interpolate": dict(num_layers=6),
    "solar": dict(num_layers=6),
    "layers": dict(sources=[0, 1, 1, 2, 3, 3]),
    "upcycle": dict(num_experts=4),
    "ladder": dict(num_layers=2),
}


def test_to_register_is_to_be_tested() -> None:
    assert SIZES.keys() == OPERATORS.keys()
    assert {*WIDTH, *DEPTH} <= OPERATORS.keys()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("first", [False, True], ids=["alone", "on a grown model"])
def test_every_weight_and_moment_of_the_target_has_a_source(name: str, first: bool) -> None:
    wider = (hypercloning(CONFIG),) if first else ()
    source = wider[0].target if wider else CONFIG
    sizes = {key: 2 * size if first and key in ("embed_dim", "num_heads", "mlp_dim") else size
             for key, size in SIZES[name].items()}  # fmt: skip
    growth = Growth((*wider, OPERATORS[name].make(source, **sizes)))
    before = tree.named_leaves(abstract_params(growth.source))
    leaves = growth.leaves()
    for path, wanted in tree.named_leaves(abstract_params(growth.target)).items():
        leaf = leaves[path]
        x = jax.ShapeDtypeStruct(before[leaf.source].shape, jnp.bfloat16)
        made = jax.eval_shape(lambda x, leaf=leaf: leaf.weight(x, jnp.dtype("bfloat16")), x)
        assert (made.shape, made.dtype) == (wanted.shape, jnp.bfloat16), path
        for power in (1, 2):
            moment = jax.eval_shape(lambda x, leaf=leaf, p=power: leaf.moment(x, p), before[leaf.source])
            assert moment.shape == wanted.shape, path
        assert leaf.rate() > 0


@pytest.mark.parametrize("name", SIZES)
def test_what_it_promises_is_what_its_table_says(name: str) -> None:
    step = OPERATORS[name].make(CONFIG, **SIZES[name])
    always = {"yes": True, "no": False}.get(OPERATORS[name].preserves)
    assert step.name == name
    assert always is None or step.preserves is always
    assert step.preserves == (not step.gap)
