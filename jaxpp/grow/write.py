"""Grow a checkpoint on disk: read, made, written, proved, and only then put in place."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxpp import runtime
from jaxpp.conversion import Format, check_target, convert, load
from jaxpp.data.published import TEXTS
from jaxpp.documents import family_to_write
from jaxpp.grow.grown import GROWTH, Grown
from jaxpp.grow.proof import NUM_GREEDY, Proof, Said, ask, compare
from jaxpp.grow.run import GrownRun
from jaxpp.grow.settings import ramp_of
from jaxpp.grow.step import Growth
from jaxpp.pretrained import CONFIG, Checkpoint, Progress, Saved, open_checkpoint
from jaxpp.train.ramp import RampConfig, make_ramp, ramped

BOUNDS = {"float32": 0.0, "float16": 4e-3, "bfloat16": 4e-2}
"""What rounding the weights to a dtype adds to the bound of an operator."""


class NotPreserved(ValueError):
    """A growth that should compute the same function does not."""


@dataclass(frozen=True)
class Exam:
    """What source and target are run on.

    Args:
        tokens: ``[batch, seq]`` ids.
        text: to be scored, if any.
        num_greedy: tokens to continue with.
        max_tokens: of the text.
    """

    tokens: Any
    text: str = ""
    num_greedy: int = NUM_GREEDY
    max_tokens: int = 4096

    def of(self, checkpoint: Checkpoint, mesh: str, like: Said | None = None, ramp: RampConfig | None = None) -> Said:
        """Load a checkpoint in fp32, and run it; with a ramp, as it is where the ramp begins."""
        model, greedy = load(checkpoint, mesh, dtype="float32"), self.num_greedy
        if ramp is not None and (masks := make_ramp(ramp, model)) is not None:
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            loaded, model = model.loaded, nnx.merge(graph, ramped(params, masks, 0.0), rest)
            model.loaded = loaded
        said = ask(model, self.tokens, like=like, text=self.text, num_greedy=greedy, max_tokens=self.max_tokens)
        del model
        gc.collect()
        return said


def some_tokens(vocab_size: int, rows: int = 2, length: int = 64, seed: int = 0) -> np.ndarray:
    """Draw ids for an exam of a checkpoint without tokenizer or text."""
    return np.random.default_rng(seed).integers(vocab_size, size=(rows, length)).astype(np.int32)


def grow(
    source: str | Path | Checkpoint,
    target: str | Path,
    growth: Growth,
    to: Format,
    *,
    exam: Exam | None = None,
    carry: bool = False,
    mesh: str = "data:1",
    dtype: str | None = None,
    family: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Proof | None:
    """Grow a checkpoint into a new one.

    The target is written beside its place and takes it when it is whole and proved; until then nothing that lies there
    changes.

    Args:
        source: as `jaxpp.load` takes.
        target: the directory to write.
        growth: the steps.
        to: ``"hf"`` or ``"orbax"``.
        exam: what both models are run on; None: no proof.
        carry: grow the whole training run, its optimizer state too; the target is a run that trains on.
        mesh: where weights are made.
        dtype: of the weights; None: each as it is stored.
        family: ``model_type`` to write as.
        overwrite: replace a checkpoint of the same format that lies in `target`.
        progress: called with the bytes made since the last call.
        say: called with the line of each phase.

    Returns:
        The proof, None without an exam.

    Raises:
        NotPreserved: the growth promises the same function and the target does not compute it; nothing was replaced.
        ValueError: what the user can mend, before a weight is read.
        OSError: the disk is full; nothing was replaced.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, str | Path) else source
    place, say = Path(target).expanduser(), say or (lambda line: None)
    check_target(place, to, overwrite, checkpoint.name)
    if to == "hf":
        family_to_write(growth.target, checkpoint.texts, family)
    beside = place.with_name(f"{place.name}.growing")
    before = None
    if exam is not None:
        say(f"running the source, {checkpoint.name}")
        before = exam.of(checkpoint, mesh)
    _clear(beside)
    try:
        say(f"growing into {place}")
        _write(checkpoint, beside, place, growth, to, carry, mesh, dtype, family, progress)
        runtime.barrier("the first process has written its documents")
        proof = None
        if exam is not None and before is not None:
            say("running the target")
            name = dtype or str(max(map(str, set(checkpoint.dtypes.values())), key=lambda name: BOUNDS.get(name, 0)))
            ramp = ramp_of(growth)
            bound = growth.bound + BOUNDS.get(name, 0.0) if ramp or not growth.gap else math.inf
            proof = compare(before, exam.of(open_checkpoint(beside), mesh, before, ramp), bound)
            _refuse(proof, growth)
        if runtime.is_main():
            _put_in_place(beside, place)
        runtime.barrier("the target is in its place")
    except BaseException:
        if runtime.is_main():  # without a barrier: the others may have failed elsewhere
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return proof


def _write(
    checkpoint: Checkpoint,
    beside: Path,
    place: Path,
    growth: Growth,
    to: Format,
    carry: bool,
    mesh: str,
    dtype: str | None,
    family: str,
    progress: Progress | None,
) -> None:
    if carry:
        assert isinstance(checkpoint, Saved)
        GrownRun(checkpoint, growth, place, mesh).write(beside, progress)
        return
    grown = Grown(checkpoint, growth)
    convert(grown, beside, to, mesh=mesh, dtype=dtype, family=family, reading=progress)
    if to == "hf" and runtime.is_main():
        (beside / GROWTH).write_text(grown.texts[GROWTH], encoding="utf-8")


def _refuse(proof: Proof, growth: Growth) -> None:
    if not proof.holds:
        names = ", ".join(step.name for step in growth.steps)
        raise NotPreserved(
            f"{names} should compute the same function, but logits differ by {proof.gap:.2e} of {proof.largest:.3g}, "
            f"{proof.relative:.1e} relative, where {proof.bound:.0e} is promised; nothing was written"
        )


def _clear(directory: Path) -> None:
    if runtime.is_main():
        shutil.rmtree(directory, ignore_errors=True)
    runtime.barrier(f"{directory.name} is cleared")


def _put_in_place(beside: Path, place: Path) -> None:
    """Move a directory to its place; what lies there and is no part of a checkpoint stays."""
    if not place.exists():
        os.replace(beside, place)
        return
    old = place.with_name(f"{place.name}.replaced")
    os.replace(place, old)
    os.replace(beside, place)
    for one in old.iterdir():
        if not (place / one.name).exists() and not _is_of_a_checkpoint(one.name):
            os.replace(one, place / one.name)
    shutil.rmtree(old)


def _is_of_a_checkpoint(name: str) -> bool:
    return name.isdigit() or name.endswith((".safetensors", ".safetensors.index.json")) or name in (CONFIG, *TEXTS)
