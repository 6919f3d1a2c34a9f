"""What a growth will do, in words, before a weight is read; and what its proof found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxpp import dims, tree
from jaxpp.data import Tokenizer
from jaxpp.grow.proof import Proof
from jaxpp.grow.settings import settings_of
from jaxpp.grow.step import Growth, Step
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import abstract_params
from jaxpp.quantities import show_bytes
from jaxpp.train.report import columns


def describe(growth: Growth, num_bytes: int, adam: bool = True) -> str:
    """Describe a growth: the steps, the map of each dim, sizes before and after, whether it is exact.

    Args:
        growth: the steps.
        num_bytes: of the target's weights.
        adam: whether to say what training needs too: fp32 weights, gradients and two moments.
    """
    steps = [row for step in growth.steps for row in _step(step)]
    before, after = (_size(config) for config in (growth.source, growth.target))
    lines = [
        *columns(steps), "",
        f"parameters  {before:,} -> {after:,} ({after / before:.2f} times)",
        f"weights     {show_bytes(num_bytes)}" + (f"; to train in fp32 {show_bytes(16 * after)}" if adam else ""),
        f"function    {_function(growth)}",
        f"rates       {_rates(growth)}",
    ]  # fmt: skip
    return "\n".join(lines)


def _step(step: Step) -> list[tuple[str, ...]]:
    fields = _changed(step.source, step.target)
    first = (step.name, "exact" if step.preserves else "not exact", *(fields[:1] or [""]))
    return [first, *(("", "", field) for field in fields[1:])]


def _changed(before: DecoderConfig, after: DecoderConfig, prefix: str = "") -> list[str]:
    """List the settings of a model that change, as ``embed_dim 64 -> 128``."""
    found = []
    for one in dataclasses.fields(before):
        old, new = getattr(before, one.name), getattr(after, one.name)
        if old == new:
            continue
        if dataclasses.is_dataclass(old):
            found += _changed(old, new, f"{prefix}{one.name}.")  # type: ignore[arg-type]
        else:
            found.append(f"{prefix}{one.name} {_short(old)} -> {_short(new)}")
    return found


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"{len(value)} values"
    return str(value)


def _size(config: DecoderConfig) -> int:
    return dims.num_parameters(abstract_params(config))


def _function(growth: Growth) -> str:
    if growth.gap:
        return f"changes: {growth.gap}"
    return f"the same, to {growth.bound:.0e} of the largest logit in fp32"


def _rates(growth: Growth) -> str:
    rates = settings_of(growth).rates
    if not rates:
        return "as they were"
    groups: dict[float, int] = {}
    for rate in rates.values():
        groups[rate] = groups.get(rate, 0) + 1
    said = ", ".join(f"x {rate:.4g} on {count}" for rate, count in sorted(groups.items()))
    total = len(tree.named_nodes(abstract_params(growth.target)))
    return f"{said} of {total} weights, with which training goes on as it was (growth.yaml)"


def show_proof(proof: Proof, tokenizer: Tokenizer | None) -> str:
    """Say what the proof found, in a few lines."""
    promise = f"promised {proof.bound:.0e}" if math.isfinite(proof.bound) else "no promise"
    rows = [("logits", f"differ by {proof.gap:.2e} of {proof.largest:.4g}: {proof.relative:.1e} relative, {promise}")]
    if proof.before is not None and proof.after is not None:
        of = f"on {proof.before.num_tokens:,} tokens"
        rows.append(("perplexity", f"{proof.before.perplexity:.4f} -> {proof.after.perplexity:.4f} {of}"))
    count = len(proof.greedy_before)
    if count:
        rows.append(("greedy", f"{proof.num_equal} of {count} tokens are equal"))
        rows += [(name, text) for name, text in _continuations(proof, tokenizer)]
    return "\n".join(columns(rows))


def _continuations(proof: Proof, tokenizer: Tokenizer | None, most: int = 100) -> Sequence[tuple[str, str]]:
    if tokenizer is None:
        return []
    texts = [" ".join(tokenizer.decode(list(ids)).split()) for ids in (proof.greedy_before, proof.greedy_after)]
    shown = [text if len(text) <= most else f"{text[:most]}..." for text in texts]
    same = proof.greedy_before == proof.greedy_after
    if same:
        return [("  both say", shown[0])]
    return [("  source", shown[0]), ("  target", f"{shown[1]} (as far as they agree, and one token)")]
