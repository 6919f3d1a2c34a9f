"""What does not fit is refused in one line that names what would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp import pipeline, schedule
from tests.pipeline import functions

TABLE = schedule.build("1f1b", 2, 4)
KNOWN, DATA = functions.stages(2), functions.batch(8)


@pytest.mark.parametrize(
    ("known", "data", "mesh", "options", "message"),
    [
        (functions.stages(3), DATA, None, {}, "3 stages are given; schedule 1f1b on 2 ranks runs 2"),
        (
            KNOWN,
            functions.batch(6),
            None,
            {},
            "a batch of 6 rows does not split into 4 microbatches; sizes 4 or 8 would",
        ),
        (KNOWN, {**DATA, "one": np.ones(3)}, None, {}, "leaves of the batch have 3 and 8 rows"),
        (KNOWN, DATA, "stage:4 data:2", {}, 'has 2 ranks, but mesh axis stage has size 4; "stage:2 data:2" has 2'),
        (KNOWN, DATA, None, {"tied": [((0, "w"), (1, "v"))]}, "tied weight v of stage 1: no such weight; it has b, w"),
        (KNOWN, DATA, None, {"tied": [((0, "w"), (1, "b"))]}, "have shapes .8, 8. and .8,."),
        ([KNOWN[0], (functions.middle, KNOWN[1][1])], DATA, None, {}, "the last stage returned shapes"),
        ([(functions.first, {"w": jnp.ones(3, int)}), KNOWN[1]], DATA, None, {}, "weight w is int32; floating weights"),
    ],
)
def test_refused(known: list, data: dict, mesh: str | None, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pipeline.run(known, TABLE, data, mesh, **options)
    assert "\n" not in str(error.value)


def test_an_entry_belongs_to_the_first_stage() -> None:
    late = pipeline.Stage(functions.last, KNOWN[1][1], entry=lambda params, batch: batch["x"])
    with pytest.raises(ValueError, match="stage 1 has an entry; only stage 0"):
        pipeline.run([KNOWN[0], late], TABLE, DATA)


def test_more_ranks_than_devices() -> None:
    count = jax.device_count() + 1
    with pytest.raises(ValueError, match=f"stage:{count}"):
        pipeline.run(functions.stages(count), schedule.build("gpipe", count, 1), functions.batch(2))
