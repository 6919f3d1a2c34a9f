"""Factors on the learning rates of single weights, by their paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import optax

from jaxpp import tree
from jaxpp.names import unknown

Rates = Mapping[str, float]
"""Path of a weight, or a pattern such as ``"blocks/*/kernel"`` (a star also stands for slashes), to a factor."""


def rate_of(path: str, rates: Rates) -> float:
    """Return the factor of a weight: that of its own path, else of the pattern with the most letters, else 1.

    Example:
        >>> rates = {"blocks/*": 0.5, "blocks/*/kernel": 0.25, "blocks/mlp/up/kernel": 2.0}
        >>> [rate_of(f"blocks/mlp/{name}", rates) for name in ("up/bias", "down/kernel", "up/kernel")]
        [0.5, 0.25, 2.0]
    """
    fitting = [key for key in rates if key == path or fnmatch.fnmatchcase(path, key)]
    nearest = max(fitting, key=lambda key: (key == path, len(key) - key.count("*")), default=None)
    return 1.0 if nearest is None else rates[nearest]


def check_rates(rates: Rates, params: Any) -> None:
    """Refuse factors of weights that are not there.

    Args:
        rates: the factors.
        params: all weights of the model, arrays or shapes.

    Raises:
        ValueError: a key that fits no weight; the nearest path is named.
    """
    paths = list(tree.named_nodes(params))
    for key in rates:
        if not any(key == path or fnmatch.fnmatchcase(path, key) for path in paths):
            raise ValueError(unknown("optimizer.rates: no weight", key, paths, "weights"))


def at_rates(rule: optax.GradientTransformation, rates: Rates) -> optax.GradientTransformationExtraArgs:
    """Multiply what a rule makes of each gradient by the weight's factor, and leave its decay of the weight.

    The rule sees each weight divided by its factor, and its update is multiplied by it: a decay, linear in the weight,
    comes out as it was. The state is the rule's own, names and values.

    Args:
        rule: an optimizer with its learning rate, whose use of the weights themselves is linear.
        rates: the factors, all above 0.

    Returns:
        The optimizer. Its update refuses factors of weights that are not there, unless ``grad_norm`` says that it is
        given a part of the model (see `jaxpp.pipeline.clip_by_norm`).
    """
    inner = optax.with_extra_args_support(rule)

    def times(state: Any, power: int) -> Any:
        def one(path: str, node: Any) -> Any:
            value = node.get_value() if tree.is_variable(node) else node
            factor = rate_of(path, rates)
            return value if factor == 1 else value * factor if power > 0 else value / factor

        return tree.map_named(one, state)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        if "grad_norm" not in given:
            check_rates(rates, updates)
        updates, state = inner.update(updates, state, None if params is None else times(params, -1), **given)
        return times(updates, 1), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
