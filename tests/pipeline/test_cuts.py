"""Layers dealt out to stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxpp.pipeline import balanced_cuts, check_cuts, even_cuts


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"), [(8, 4, (2, 2, 2, 2)), (10, 4, (2, 3, 3, 2)), (9, 4, (2, 3, 2, 2)), (5, 5, (1,) * 5)]
)
def test_even(layers: int, stages: int, cuts: tuple[int, ...]) -> None:
    assert even_cuts(layers, stages) == cuts


def test_balanced_is_the_best_of_all() -> None:
    draw = np.random.RandomState(0)
    for _ in range(20):
        layers, stages = draw.randint(4, 9), draw.randint(2, 5)
        costs, ends = draw.uniform(0.5, 2, layers).tolist(), draw.uniform(0, 3, 2).tolist()

        def dearest(cuts: tuple[int, ...], costs: list = costs, ends: list = ends) -> float:
            bounds = np.cumsum([0, *cuts])
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            return max(*sums[1:-1], sums[0] + ends[0], sums[-1] + ends[1])

        every = [cuts for cuts in itertools.product(range(1, layers), repeat=stages) if sum(cuts) == layers]
        found = balanced_cuts(costs, stages, *ends)
        assert sum(found) == layers and dearest(found) == pytest.approx(min(map(dearest, every)))


def test_refused() -> None:
    with pytest.raises(ValueError, match="5 stages of 4 layers; from 1 to 4 stages are possible"):
        even_cuts(4, 5)
    with pytest.raises(ValueError, match=r"cuts \[3, 4\] add up to 7 layers; 8 are there, .*: 4/4 would do"):
        check_cuts([3, 4], 8, 2)
    with pytest.raises(ValueError, match=r"cuts \[8\] name 1 stages; the schedule has 2: 4/4"):
        check_cuts([8], 8, 2)
    with pytest.raises(ValueError, match="at least one to a stage"):
        check_cuts([8, 0], 8, 2)
    with pytest.raises(ValueError, match="a cost is -1"):
        balanced_cuts([1, -1], 2)
