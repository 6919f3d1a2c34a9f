"""What decoding sends, in compiled HLO: the formulas of `Tensor1D` and of keys and values by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.conversion import load
from jaxpp.nn.paged import Table
from jaxpp.serve import Engine
from tests.contract import collectives
from tests.golden import reading

ROWS = 8


def sent(engine: Engine) -> dict[tuple[str, int], int]:
    """Return the elements of each kind of collective, and group size, of one token for every slot."""
    program: Any = engine._program
    step = program.geometry.page_steps(1)[-1]
    tables = tuple(
        Table(jnp.zeros((ROWS, program.geometry.table_width(span, step, 1)), jnp.int32), jnp.zeros(ROWS, jnp.int32))
        for span in program.spans
    )
    arguments = (jnp.zeros(ROWS, jnp.int32), np.zeros((ROWS, 1), np.int32), np.ones(ROWS, np.int32), tables)
    compiled = program._compiled.lower(program._weights, program.pages, *arguments, every=False).compile()
    return dict(collectives.elements(compiled.as_text()))


@pytest.mark.parametrize("case, mesh, num_devices", [("llama_gqa", "tensor:2", 2), ("llama_gqa", "tensor:4", 4)])
def test_by_heads_two_all_reduces_a_layer_and_one_for_the_embedding(
    case: str, mesh: str, num_devices: int, tmp_path: Path
) -> None:
    """Also where kv heads are fewer than devices: they are computed where they are kept."""
    model = load(reading.write(case, tmp_path), mesh)
    config = model.config
    engine = Engine(model, slots=ROWS, max_context=64, page=4, chunk=8)
    activations = ROWS * config.embed_dim
    assert sent(engine) == {("all-reduce", num_devices): (2 * config.num_layers + 1) * activations}


def test_by_batch_queries_travel_there_and_back(tmp_path: Path) -> None:
    """One kv head, which every device computes: only queries and results move, by two all-to-alls a layer."""
    model = load(reading.write("llama_mqa", tmp_path), "tensor:4")
    config = model.config
    engine = Engine(model, slots=ROWS, max_context=64, page=4, chunk=8, kv_split="batch")
    found = sent(engine)
    per_device = ROWS * config.num_heads * config.head_dim // 4
    assert found["all-to-all", 4] == 2 * config.num_layers * per_device
    assert found["all-reduce", 4] == (2 * config.num_layers + 1) * ROWS * config.embed_dim
    angles = found.get(("all-gather", 4), 0)  # of the positions, once
    assert angles <= 2 * ROWS * config.rotary_dim // 2 and set(found) <= {
        (k, 4) for k in ("all-to-all", "all-reduce", "all-gather")
    }
