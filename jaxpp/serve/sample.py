"""From a checkpoint on disk to text: restore the weights onto a mesh and continue a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from flax import nnx

from jaxpp.checkpoint import Checkpoints
from jaxpp.data import Tokenizer
from jaxpp.mesh import Device, MeshSpec
from jaxpp.model import ModelConfig
from jaxpp.parallel import Plan
from jaxpp.serve.generate import generate


def _devices(mesh: str) -> Sequence[Device]:
    """Return as many devices as a mesh names; all of them where it takes the rest, or more than there are."""
    spec = MeshSpec.parse(mesh)
    free = -1 in spec.ici.values()
    return jax.devices() if free else jax.devices()[: math.prod(map(spec.size, spec.axes))]


def restore_model(config: ModelConfig, checkpoints: Checkpoints, step: int, plan: Plan) -> nnx.Module:
    """Build a model with the weights of a checkpoint, restored onto the plan's layout.

    Raises:
        ValueError: the weights do not fit the config, or the config the mesh.
    """
    layout = plan.layout(_devices(plan.mesh))
    graph, params, other = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)
    layout.check(params)
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, layout.param_shardings(params)
    )
    return nnx.merge(graph, checkpoints.restore(step, like, prefix="params"), other)


def sample(
    config: ModelConfig,
    directory: Path,
    step: int,
    prompt: str,
    *,
    mesh: str = "data:1",
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Continue a prompt with the model of a checkpoint.

    Args:
        config: the model's config.
        directory: that holds the steps.
        step: which one.
        prompt: text, not empty.
        mesh: where the weights go: on the first devices, as many as it names.
        max_new_tokens: most tokens to add.
        temperature: 0 is greedy.
        top_k: 0: no cut.
        seed: of the draws.

    Returns:
        Pieces of text as they come; a piece never ends inside a character.
    """
    checkpoints = Checkpoints(directory, writable=False)
    tokenizer = Tokenizer.from_json(checkpoints.texts(step)["tokenizer.json"])
    plan = Plan(mesh=mesh)
    model = restore_model(config, checkpoints, step, plan)
    ids = tokenizer.encode(prompt)
    execution = plan.execution(plan.layout(_devices(mesh)))
    tokens = generate(
        model, [int(i) for i in ids], max_new_tokens, max_positions=config.max_positions, temperature=temperature,
        top_k=top_k, seed=seed, end_of_text=tokenizer.end_of_text, execution=execution,
    )  # fmt: skip
    return _text(tokenizer, tokens)


def _text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    held: list[int] = []
    for token in tokens:
        held.append(token)
        piece = tokenizer.decode(held)
        if not piece.endswith("\ufffd"):
            yield piece
            held = []
    if held:
        yield tokenizer.decode(held)
