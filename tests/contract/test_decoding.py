"""What decoding sends, in compiled HLO, is what the partitioner predicts, in kind, number and size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.conversion import load
from jaxpp.nn.paged import Table
from jaxpp.partition import rank_layouts
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


def predicted(config: Any, mesh: str, kv: str) -> dict[tuple[str, int], int]:
    """Return the same from the partitioner's formulas; the best logit of each part is the sampler's affair."""
    ranking = rank_layouts(config, mesh, batch=ROWS, context=64, prompt=8, dtype="float32")
    [candidate] = [one for one in ranking.decode if (one.layout.scheme, one.layout.kv) == ("1D", kv)]
    found: Counter[tuple[str, int]] = Counter()
    for one in candidate.collectives:
        if one.part != "head best":
            found[one.kind, one.group] += one.count * int(one.message_bytes) // 4
    return dict(found)


@pytest.mark.parametrize(
    "case, mesh",
    [
        ("llama_gqa", "tensor:2"),
        ("llama_gqa", "tensor:4"),
        ("gpt2", "tensor:4"),
        ("gemma2", "tensor:2"),
        ("mixtral", "tensor:2"),
    ],
)
def test_by_heads_it_sends_what_the_partitioner_predicts(case: str, mesh: str, tmp_path: Path) -> None:
    """Two all-reduces a layer and one for the embedding; also where kv heads are fewer than devices."""
    model = load(reading.write(case, tmp_path), mesh)
    engine = Engine(model, slots=ROWS, max_context=64, page=4, chunk=8)
    assert sent(engine) == predicted(model.config, mesh, "heads")


@pytest.mark.parametrize("case, mesh", [("llama_mqa", "tensor:4"), ("gpt2", "tensor:4")])
def test_by_batch_too(case: str, mesh: str, tmp_path: Path) -> None:
    """Queries, results, and keys and values where they are split, travel; what positions become is gathered once."""
    model = load(reading.write(case, tmp_path), mesh)
    engine = Engine(model, slots=ROWS, max_context=64, page=4, chunk=8, kv_split="batch")
    found = sent(engine)
    positions = found.pop(("all-gather", 4), 0)
    assert found == predicted(model.config, mesh, "batch")
    assert positions <= ROWS * model.config.embed_dim
