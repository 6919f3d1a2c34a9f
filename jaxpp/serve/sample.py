"""From a loaded model to text: continue a prompt, or answer it by the model's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxpp.data import Tokenizer
from jaxpp.serve.generate import generate

_CONTEXT = 8  # tokens before a piece, behind which it is decoded


def sample(
    model: Any,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Continue a prompt.

    Args:
        model: as `jaxpp.load` returns it, with a tokenizer.
        prompt: text, not empty.
        chat: the prompt is what a user says; the model answers.
        max_new_tokens: most tokens to add.
        temperature: 0 is greedy.
        top_k: 0: no cut.
        seed: of the draws.

    Returns:
        Pieces of text as they come; a piece never ends inside a character.

    Raises:
        ValueError: there is no tokenizer or no chat template, or the prompt is empty or too long.
    """
    tokenizer = required(model.loaded.tokenizer)
    ids = prompt_ids(tokenizer, prompt, chat)
    tokens = generate(
        model, ids, max_new_tokens, max_positions=model.config.max_positions,
        temperature=temperature, top_k=top_k, seed=seed, ends=tokenizer.ends, num_tokens=tokenizer.vocab_size,
        execution=model.loaded.execution,
    )  # fmt: skip
    return _text(tokenizer, ids, tokens)


def prompt_ids(tokenizer: Tokenizer | None, prompt: str, chat: bool = False) -> list[int]:
    """Return the ids of a prompt, or of a conversation that a user opens with it.

    Raises:
        ValueError: there is no tokenizer, or no chat template or one that fails.
    """
    tokenizer = required(tokenizer)
    if chat and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; a base model continues text: leave chat out")
    ids = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt, begin=True)
    return [int(i) for i in ids]


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        ValueError: it has none.
    """
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer; put its tokenizer.json beside the weights")
    return tokenizer


def _text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """Decode tokens as they come, behind some that came before: alone, a piece could lose its leading space."""
    before, held = list(prompt)[-_CONTEXT:], list[int]()
    for token in tokens:
        held.append(token)
        piece = _behind(tokenizer, before, held)
        if not piece.endswith("\ufffd"):
            yield piece
            before, held = [*before, *held][-_CONTEXT:], []
    if held:
        yield _behind(tokenizer, before, held)


def _behind(tokenizer: Tokenizer, before: list[int], held: list[int]) -> str:
    return tokenizer.decode([*before, *held])[len(tokenizer.decode(before)) :]
