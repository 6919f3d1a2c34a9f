"""The notation of parts: shapes, views without a copy, in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp.convert.part import Part
from tests.convert import toy

SIZES = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 3, "mlp": 5, "experts": 2}


@pytest.mark.parametrize(
    "axes, order, shape",
    [
        ("mlp embed", ("embed", "mlp"), (5, 6)),
        ("embed (heads head_dim)", ("heads", "head_dim", "embed"), (6, 12)),
        ("(heads@0/8 head_dim) embed", ("embed", "heads", "head_dim"), (24, 6)),
        ("(kv_heads@4/8 head_dim) embed", ("embed", "kv_heads", "head_dim"), (24, 6)),
        ("(heads 1/3 head_dim) embed", ("embed", "heads", "head_dim"), (36, 6)),
        ("embed (2/3 heads head_dim)", ("embed", "heads", "head_dim"), (6, 36)),
        ("experts (1/2 mlp) embed", ("experts", "embed", "mlp"), (2, 10, 6)),
        ("0/1 embed", ("embed",), (1, 6)),
        ("embed", ("embed",), (6,)),
    ],
)
def test_a_view_copies_nothing_and_writes_through(axes: str, order: tuple[str, ...], shape: tuple[int, ...]) -> None:
    part = Part("x", axes)
    assert part.shape(SIZES) == shape
    whole = np.arange(np.prod(shape)).reshape(shape)
    view = part.view(whole, order, SIZES)
    assert view.shape == tuple(SIZES[dim] for dim in order)
    assert np.shares_memory(view, whole)
    values = view.copy()
    fresh = np.full_like(whole, -1)
    part.view(fresh, order, SIZES)[...] = values
    assert ((fresh == whole) | (fresh == -1)).all() and (fresh != -1).sum() == values.size


@pytest.mark.parametrize("path", toy.WEIGHTS)
def test_a_view_is_the_dumb_formula(path: str) -> None:
    _, parts, dumb = toy.WEIGHTS[path]
    arrow = toy.WEIGHTS[path][0].replace("->", " ").replace("|", " ").split()
    spelled = [dim for dim, word in (("layers", "{layer}"), ("experts", "{expert}")) if word in parts[-1].tensor]
    shape = parts[-1].shape(toy.SIZES)
    whole = np.arange(np.prod(shape)).reshape(shape)
    view = parts[-1].view(whole, [dim for dim in arrow if dim not in spelled], toy.SIZES)
    assert np.array_equal(view, dumb(whole))


def test_names() -> None:
    part = Part("model.layers.{layer}.experts.{expert}.w1.weight", "mlp embed")
    assert part.name(3, 7) == "model.layers.3.experts.7.w1.weight"
    assert Part("lm_head.weight", "vocab embed").name(3, 7) == "lm_head.weight"


@pytest.mark.parametrize("axes", ["heads@4 embed", "1/ embed", "Embed", "heads@1/2/3"])
def test_a_malformed_axis_is_our_own_fault(axes: str) -> None:
    with pytest.raises(AssertionError, match="is neither dim, dim@start/total nor index/count"):
        Part("x", axes).shape(SIZES)
