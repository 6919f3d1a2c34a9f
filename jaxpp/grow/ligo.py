"""Learned linear growth: each new weight is a linear map of the old ones, and a short training learns the map.

The old weights stay as they are; the loss of the large model is differentiated through the map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.grow.ligo_map import Form, Learned, Mapped, draw_map, forms_of, groups_of, maps_of
from jaxpp.grow.places import carried_over
from jaxpp.grow.step import Step
from jaxpp.grow.target import check_families, check_sizes
from jaxpp.model import Batch
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Execution, Layout, executing

GAP = "a learned map does not preserve the function"


def learn(
    model: Any,
    target: DecoderConfig,
    batches: Iterable[Batch],
    *,
    num_steps: int = 100,
    learning_rate: float = 2e-4,
    seed: int = 0,
    layout: Layout | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Step:
    """Learn how a model becomes a larger one; stream, heads, mlp and depth may grow.

    One map is shared by all that reads or writes the stream. Each layer has maps of its own for queries, keys, values
    (the attention's output reads by the values') and the mlp; each weight has its own alpha, where the depth grows.

    Args:
        model: the small decoder.
        target: config to reach.
        batches: one for each step, as `jaxpp.model.Batch` describes them.
        num_steps: updates of the map.
        learning_rate: of Adam.
        seed: of the map at the start.
        layout: of the large model; None: that of `model`, if it was loaded onto a mesh.
        progress: called with the number of updates done and the mean loss in nats before each.

    Returns:
        A step that makes the weights one at a time. It does not preserve the function; moments restart at zero.

    Raises:
        ValueError: models that differ in more than these sizes; fewer batches than steps.

    Cost: memory: all of the large model and its activations, as in training without its optimizer, and the maps with
        two moments, which are about as large as the large model's blocks; split over all devices where they divide.

    Source: Wang, Panda, Hennigen, Greengard, Karlinsky, Feris, Cox, Wang, Kim, Learning to Grow Pretrained Models for
        Efficient Transformer Training (LiGO), 2023, section 3.
    """
    config, target = model.config, _checked(model.config, target)
    execution = model.loaded.execution if model.loaded and layout is None else Execution(layout)
    maps = maps_of(config, target)
    forms = forms_of(config, target, maps)
    training = _Training(target, forms, execution, optax.adam(learning_rate))
    learned, moments = training.begin(draw_map(maps, forms, config.num_layers, target.num_layers, seed))
    held = training.held(nnx.split(model, nnx.Param, ...)[1])
    for done, batch in enumerate(_exactly(batches, num_steps)):
        learned, moments, loss = training.step(learned, moments, held, training.placed(batch))
        if progress:
            progress(done, float(loss))
    found = training.gathered(learned)
    words = {name: f"{one.old} -> {one.new}" for name, one in maps.items() if one.new > one.old}
    if target.num_layers > config.num_layers:
        words["layers"] = f"{config.num_layers} -> {target.num_layers}"
    return Step("ligo", config, target, {path: Mapped(form, found) for path, form in forms.items()}, words, GAP)


def _checked(config: DecoderConfig, target: DecoderConfig) -> DecoderConfig:
    """Refuse what no map reaches; return the target with the source's rows that fill tables up."""
    check_families(config, target)
    check_sizes(config, target)
    for name in ("head_dim", "vocab_size"):
        if getattr(config, name) != (new := getattr(target, name)):
            operator = name.removesuffix("_size")
            raise ValueError(f"ligo: {name} {new} is not {getattr(config, name)}; grow it by the operator {operator}")
    groups = groups_of(config, target)
    if groups[1] < groups[0]:
        least = groups[0] * target.num_kv_heads
        raise ValueError(
            f"ligo: {target.num_heads} heads on {target.num_kv_heads} kv heads are groups of {groups[1]}, and the old "
            f"ones of {groups[0]}; {least} heads or more are needed"
        )
    target = replace(target, vocab_rows=config.vocab_rows)
    fixed = ("num_experts", "experts_per_token", "normalize", "shared_gate")
    if wrong := [name for name in fixed if getattr(config.moe, name) != getattr(target.moe, name)]:
        raise ValueError(f"ligo: moe.{wrong[0]} {getattr(target.moe, wrong[0])} is not {getattr(config.moe, wrong[0])}")
    old, new = config.moe.shared_mlp_dim, target.moe.shared_mlp_dim
    if new < old or (new and not old):
        raise ValueError(f"ligo: moe.shared_mlp_dim {new}: {f'{old} or more are' if old else '0 is'} needed")
    return target


def _exactly(batches: Iterable[Batch], num_steps: int) -> Iterator[Batch]:
    """Yield as many batches as there are steps, and ask for no more."""
    remaining = iter(batches)
    for done in range(num_steps):
        try:
            yield next(remaining)
        except StopIteration:
            raise ValueError(f"ligo: {done} batches for {num_steps} steps; give more batches, or fewer steps") from None


@dataclass(frozen=True, eq=False)
class _Training:
    """The training of a map: the loss of the large model, differentiated through the map into what is learned.

    Args:
        target: config of the large model.
        forms: how its weights are made.
        execution: how it runs.
        optimizer: of the map.
    """

    target: DecoderConfig
    forms: Mapping[str, Form]
    execution: Execution
    optimizer: optax.GradientTransformation

    @cached_property
    def _model(self) -> tuple[Any, Any, Any]:
        graph, params, other = nnx.split(nnx.eval_shape(lambda: self.target.build(nnx.Rngs(0))), nnx.Param, ...)
        return graph, params, other

    @cached_property
    def _places(self) -> dict[str, NamedSharding]:
        layout = self.execution.layout
        return tree.named_leaves(layout.param_shardings(self._model[1])) if layout else {}

    def _split(self, values: Any, put: Callable[[Any, Any], Any] = jax.lax.with_sharding_constraint) -> Any:
        """Split learned rows, and their moments, over all devices where they divide."""
        if (layout := self.execution.layout) is None:
            return values
        mesh = layout.mesh

        def place(x: Any) -> NamedSharding:
            divides = x.ndim >= 2 and x.shape[-2] % mesh.size == 0
            spec = [*[None] * (x.ndim - 2), mesh.axis_names, None] if divides else []
            return NamedSharding(mesh, PartitionSpec(*spec))

        return jax.tree.map(lambda x: put(x, place(x)), values)

    def begin(self, drawn: Any) -> tuple[Any, Any]:
        """Return what is learned and its moments."""
        learned = self._split(jax.tree.map(jnp.asarray, drawn), jax.device_put)
        return learned, jax.jit(lambda learned: self._split(self.optimizer.init(learned)))(learned)

    def held(self, params: Any) -> dict[str, jax.Array]:
        """Return the small model's weights, laid out as the large model's are."""
        arrows = dims.arrows(params)

        def place(path: str, x: jax.Array) -> jax.Array:
            if path not in self._places:
                return x
            arrow = arrows[path]
            return jax.device_put(x, carried_over(self._places[path], arrow.dims, arrow, x.shape))

        return {path: place(path, x) for path, x in tree.named_leaves(params).items()}

    def placed(self, batch: Batch) -> dict[str, jax.Array]:
        """Lay a batch out."""
        layout = self.execution.layout
        if layout is None:
            return {name: jnp.asarray(x) for name, x in batch.items()}
        return {name: jax.device_put(x, layout.batch_sharding(np.ndim(x))) for name, x in batch.items()}

    def _loss(self, learned: Learned, held: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
        """Return the mean loss of the large model, in nats."""
        graph, like, other = self._model

        def make(path: str, node: Any) -> jax.Array:
            weight = self.forms[path].weight(held[path], learned).astype(held[path].dtype)
            return jax.lax.with_sharding_constraint(weight, self._places[path]) if self._places else weight

        with executing(self.execution):
            total, weight = nnx.merge(graph, tree.map_named(make, like), other).loss(batch)
        return total / jnp.maximum(weight, 1e-8)

    @cached_property
    def step(self) -> Any:
        """The jitted ``(learned, moments, held, batch) -> (learned, moments, loss before)``; donates the first two."""

        def step(learned: Any, moments: Any, held: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            loss, grads = jax.value_and_grad(self._loss)(learned, held, batch)
            updates, moments = self.optimizer.update(grads, moments)
            return self._split(optax.apply_updates(learned, updates)), self._split(moments), loss

        return jax.jit(step, donate_argnums=(0, 1))

    def gathered(self, learned: Any) -> Any:
        """Return what was learned whole, in the memory of each process."""
        if layout := self.execution.layout:
            learned = jax.jit(lambda x: x, out_shardings=layout.replicated())(learned)
        return jax.tree.map(np.asarray, learned)
