"""The inference partitioner: rank the layouts of a model on a mesh, for prompts and for decoding, by predicted time.

Numbers only: nothing is compiled, loaded or measured.

Source: Pope, Douglas, Chowdhery et al., Efficiently Scaling Transformer Inference, 2022; Austin et al., How to Scale
    Your Model, 2025, chapter 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpp.names import unknown
from jaxpp.partition.candidates import DTYPES, Candidate, Objective, Phase, Request, candidate
from jaxpp.partition.choose import Choice, choose
from jaxpp.partition.costs import USABLE
from jaxpp.partition.device_kinds import device_kind
from jaxpp.partition.layouts import Layout, ServingMesh, layouts
from jaxpp.partition.remedies import nothing_fits
from jaxpp.partition.report import report
from jaxpp.partition.sizes import model_sizes


@dataclass(frozen=True)
class Ranking:
    """All layouts, best first; those that do not fit come last and say why (`Candidate.problem`).

    Args:
        request: what was asked.
        prefill: for prompts.
        decode: for new tokens.
        refused: storages ``XxYZ`` that do not divide the model, and why.
        choice: one of each that go together.
    """

    request: Request
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    refused: dict[str, str]
    choice: Choice

    def __str__(self) -> str:
        return report(self)


def rank_layouts(
    config: Any,
    mesh: str,
    *,
    batch: int,
    context: int,
    device: str = "h200",
    prompt: int | None = None,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    objective: Objective = "latency",
    kv_share: float = USABLE,
) -> Ranking:
    """Rank the layouts of a model on a mesh for prefill and for decode.

    Args:
        config: of a decoder.
        mesh: e.g. ``"tensor:8"`` (factored by the partitioner), ``"data:2 tensor:4"``, ``"tensor_x:2 tensor_y:4"``.
        batch: sequences at once, on the whole mesh.
        context: tokens of each that the cache has room for; a token that is decoded sees all of them.
        device: kind, one of `DEVICE_KINDS`.
        prompt: tokens of each sequence's prompt, read in one step; None: as many as the context.
        dtype: of weights and activations; with int8 or int4 of weights alone.
        kv_dtype: of keys and values; None: that of the activations.
        objective: ``latency``: seconds of a step; ``cost``: device-seconds of a token, each at its largest batch.
        kv_share: most of a device's memory that keys and values may take.

    Returns:
        Candidates of both phases, and the pair to use.

    Raises:
        ValueError: an unknown word, a size out of range, a context longer than the model's, or a mesh on which nothing
            fits; the last says what would.

    Cost: no device is touched; milliseconds for each layout.
    """
    request = _request(config, mesh, batch, context, device, prompt, dtype, kv_dtype, objective, kv_share)
    return rank(request)


def _request(
    config: Any, mesh: str, batch: int, context: int, device: str, prompt: int | None,
    dtype: str, kv_dtype: str | None, objective: Objective, kv_share: float,
) -> Request:  # fmt: skip
    for name, value, known in (("dtype", dtype, DTYPES), ("kv_dtype", kv_dtype or dtype, DTYPES),
                               ("objective", objective, ("latency", "cost"))):  # fmt: skip
        if value not in known:
            raise ValueError(unknown(f"unknown {name}", value, known))
    if batch < 1:
        raise ValueError(f"batch {batch}: 1 or more are needed")
    if not 0 < kv_share <= 1:
        raise ValueError(f"kv_share {kv_share}: more than 0 and at most 1 is needed")
    sizes = model_sizes(config)
    if not 1 <= context <= sizes.max_positions:
        raise ValueError(f"context {context}: 1 to {sizes.max_positions} are needed, the model's max_positions")
    prompt = context if prompt is None else prompt
    if not 1 <= prompt <= context:
        raise ValueError(f"prompt {prompt}: 1 to {context} are needed, the context")
    cached = kv_dtype or (dtype if dtype in ("float32", "float16") else "bfloat16")
    kind = device_kind(device)
    return Request(
        sizes, ServingMesh.parse(mesh), kind, batch, context, prompt, dtype, cached, objective, kv_share
    )  # fmt: skip


def rank(request: Request) -> Ranking:
    """Rank the layouts of a request.

    Raises:
        ValueError: nothing fits; says what would.
    """
    found, refused = layouts(request.sizes, request.mesh)
    prefill, decode = (_ranked(request, found, phase) for phase in ("prefill", "decode"))
    if prefill[0].problem or decode[0].problem:
        raise ValueError(nothing_fits(request, prefill, decode))
    return Ranking(request, prefill, decode, refused, choose(request, prefill, decode))


def _ranked(request: Request, found: list[Layout], phase: Phase) -> tuple[Candidate, ...]:
    candidates = [candidate(request, layout, phase) for layout in found]
    return tuple(sorted(candidates, key=lambda one: (bool(one.problem), one.key(request.objective))))
