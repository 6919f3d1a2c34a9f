"""What the engine refuses before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpp.names import unknown
from jaxpp.parallel import Execution
from jaxpp.serve.request import Sampling
from jaxpp.serve.speculate import MOST


def check_length(prompt: Sequence[int], sampling: Sampling, max_context: int, vocab_size: int) -> None:
    """Refuse a prompt that is empty, has foreign ids, or with its answer is longer than the context.

    Raises:
        ValueError: with the numbers.
    """
    if not len(prompt):
        raise ValueError("the prompt is empty; give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"token ids {min(prompt)} to {max(prompt)}; this model takes 0 to {vocab_size - 1}")
    room = max_context - len(prompt)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but the model takes {max_context} with what it adds; "
            f"cut the prompt to {max_context - 1} tokens or fewer"
        )
    if sampling.max_tokens > room:
        raise ValueError(
            f"max_tokens {sampling.max_tokens} after a prompt of {len(prompt)} tokens; the model's context of "
            f"{max_context} tokens leaves room for 1 to {room}"
        )


def check_draft(model: Any, draft: Any, count: int, max_context: int) -> None:
    """Refuse a draft that cannot guess for a model.

    Raises:
        ValueError: another tokenizer or vocabulary, another mesh, a context that it does not take, a rotary rule that
            depends on the length of the row, too many tokens at a time.
    """
    if not 1 <= count <= MOST:
        raise ValueError(f"draft_tokens {count}: 1 to {MOST} are needed")
    ours, theirs = model.tokenizer, draft.tokenizer
    if draft.config.vocab_size != model.config.vocab_size:
        sizes = f"{draft.config.vocab_size} and {model.config.vocab_size} tokens"
        raise ValueError(f"the draft and the model know {sizes}; a draft of the same tokenizer is needed")
    if ours and theirs and ours.fingerprint != theirs.fingerprint:
        raise ValueError("the draft has another tokenizer than the model; its tokens would mean something else")
    if (most := draft.config.max_positions) < max_context:
        raise ValueError(f"the draft takes {most} tokens, fewer than max_context {max_context}; set that to {most}")
    meshes = [one.loaded.execution.layout.mesh if one.loaded else None for one in (model, draft)]
    if meshes[0] != meshes[1]:
        raise ValueError("the draft lies on another mesh than the model; load both with the same one")
    for name, one in (("model", model), ("draft", draft)):
        if one.config.rope_scaling.kind in ("dynamic", "longrope"):
            kind = one.config.rope_scaling.kind
            raise ValueError(f"the {name}'s rotary rule {kind} depends on the length of a row; it takes no draft")


def execution_of(model: Any, kv_split: str) -> Execution:
    """Return how a loaded model runs with its keys and values split by ``"heads"`` or by ``"batch"``.

    Raises:
        ValueError: another word.
    """
    if kv_split not in ("heads", "batch"):
        raise ValueError(unknown("kv_split", kv_split, ("heads", "batch")))
    execution = model.loaded.execution if model.loaded else Execution()
    if kv_split == "heads" or execution.layout is None:
        return execution
    return replace(execution, layout=execution.layout.cached_by_batch())


def batch_shards(execution: Execution) -> int:
    """Return over how many parts of the mesh requests are spread: slots are a multiple of it."""
    return execution.layout.num_shards("batch", "cache") if execution.layout else 1


def context_of(config: Any, wanted: int) -> int:
    """Return the tokens of prompt and answer together: those that are wanted; 0: all that the model takes, up to 2,048.

    Raises:
        ValueError: more than the model takes, too few, or a model that is no decoder.
    """
    if not hasattr(config, "layers"):
        raise ValueError(f"a {type(config).__name__} is no decoder; the engine runs decoders")
    if wanted > config.max_positions:
        raise ValueError(f"max_context {wanted}: the model takes {config.max_positions} tokens or fewer")
    if wanted < 0 or wanted == 1:
        raise ValueError(f"max_context {wanted}: 2 or more are needed, or 0 for all that the model takes, up to 2,048")
    return wanted or min(config.max_positions, 2048)


def check_layout(execution: Execution, slots: int, shards: int) -> None:
    """Refuse a layout that the engine does not run, or that the slots do not divide.

    Raises:
        ValueError: axis ``stage``, or slots that are no multiple of the batch shards.
    """
    layout = execution.layout
    if layout is not None and layout.mesh.shape.get("stage", 1) > 1:
        raise ValueError("the engine runs no pipelines; drop axis stage from the mesh, or use it as tensor")
    if slots < 1 or slots % shards:
        nearest = max(1, -(-slots // shards)) * shards
        raise ValueError(f"slots {slots}: a multiple of the mesh's {shards} batch shards is needed, such as {nearest}")
