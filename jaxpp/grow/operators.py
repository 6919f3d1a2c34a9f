"""The operators by name: each takes a model's config and sizes, and returns a `Step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpp.grow.aki import aki
from jaxpp.grow.depth import explicit, identity, interpolate, solar, stack
from jaxpp.grow.head_dim import head_dim
from jaxpp.grow.heads import heads
from jaxpp.grow.ladder import ladder
from jaxpp.grow.masked import masked
from jaxpp.grow.mlp import mlp
from jaxpp.grow.step import Step
from jaxpp.grow.upcycle import upcycle
from jaxpp.grow.vocab import vocab
from jaxpp.grow.width import hypercloning, lemon, net2net


@dataclass(frozen=True)
class Operator:
    """An operator, and what is known of it before it meets a model.

    Args:
        make: ``make(config, **sizes)`` to a `Step`.
        grows: what it makes larger, in a few words.
        preserves: ``"yes"``, ``"no"``, or when it does.
    """

    make: Callable[..., Step]
    grows: str
    preserves: str = "yes"


OPERATORS: Mapping[str, Operator] = {
    "hypercloning": Operator(hypercloning, "width by a whole factor, heads and mlp with it"),
    "lemon": Operator(lemon, "width to any size"),
    "net2net": Operator(net2net, "width and mlp to any size, units drawn at random", "where all have as many copies"),
    "aki": Operator(aki, "width and mlp to any size, new units from the layer above", "no"),
    "msg": Operator(masked, "width, mlp, heads and depth by new units that fade in while it trains", "at first"),
    "heads": Operator(heads, "attention heads, whole groups or inside groups"),
    "head_dim": Operator(head_dim, "size of a head by a whole factor"),
    "mlp": Operator(mlp, "mlp to any size"),
    "vocab": Operator(vocab, "rows for new tokens", "logits of the old tokens"),
    "identity": Operator(identity, "depth by blocks that add nothing at first"),
    "stack": Operator(stack, "depth by the whole stack again", "no"),
    "interpolate": Operator(interpolate, "depth by each layer again in its place", "no"),
    "solar": Operator(solar, "depth by two overlapping copies of the stack", "no"),
    "layers": Operator(explicit, "depth by any list of layers", "no"),
    "upcycle": Operator(upcycle, "the mlp into a mixture of experts", "unless columns are drawn anew"),
    "ladder": Operator(ladder, "nothing: the last layers read the stream one branch earlier", "no"),
}
"""By name. LiGO is not among them: it learns its map from a model and batches (`jaxpp.grow.ligo.learn`)."""


WIDTH = ("hypercloning", "lemon", "net2net", "aki", "msg")
DEPTH = ("identity", "stack", "interpolate", "solar")
