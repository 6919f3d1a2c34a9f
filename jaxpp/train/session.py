"""Opening a run: every check that costs nothing first, then the data, then the state, new or restored.

What the user can get wrong is refused here, before any compile, and before anything on disk is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxpp import config as configs
from jaxpp import dims, runtime
from jaxpp.checkpoint import Checkpoints
from jaxpp.data import Data, Tokenizer, open_data
from jaxpp.data.corpus import find_tokenizer
from jaxpp.data.loader import TrainLoader
from jaxpp.data.published import TEXTS, texts_of, tokenizer_of
from jaxpp.nn.attention import check_kernel
from jaxpp.nn.stack import remat_policy
from jaxpp.train.config import Run, active_experts, resolved
from jaxpp.train.metrics import Rates, peak_flops_per_s
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.pipelined import PipelineProgram
from jaxpp.train.programs import AnyProgram, make_program
from jaxpp.train.rates import check_rates

OWN_TEXTS = ("config.yaml", "plan.yaml", "data.json")  # what a run writes beside the documents that it carries along


class Initial(Protocol):
    """What a new run can start from: `jaxpp.pretrained.open_checkpoint` gives one."""

    @property
    def texts(self) -> Mapping[str, str]:
        """The documents that travel with the weights."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer, if it has one."""
        ...

    def read(self, like: Any) -> Any:
        """Read its weights onto the shardings and into the dtypes of `like`."""
        ...


@dataclass(frozen=True)
class Session:
    """A run that is ready to train.

    Args:
        run: its config.
        program: the compiled-once step.
        data: corpora and tokenizer.
        loader: training batches, at the right position.
        state: weights and optimizer, new or restored.
        start: updates done before.
        checkpoints: where states go.
        notes: what the user should know of how it was opened.
        documents: what travels with the weights: of the checkpoint that the run began from, or its own tokenizer.
    """

    run: Run
    program: AnyProgram
    data: Data
    loader: TrainLoader
    state: Any
    start: int
    checkpoints: Checkpoints
    notes: tuple[str, ...]
    documents: Mapping[str, str]

    @property
    def rates(self) -> Rates:
        """What turns seconds into tokens/s and MFU."""
        run, mesh = self.run, self.program.layout.mesh
        return Rates(
            run.data.batch_size * run.data.seq_len,
            dims.flops_per_token(self.program.params, run.data.seq_len, run.plan.dims, active_experts(run.model)),
            mesh.size,
            peak_flops_per_s(mesh.devices.flat[0]),
        )

    def texts(self, step: int) -> dict[str, str]:
        """Return the documents that lie beside the arrays of the checkpoint of `step`."""
        return {
            **self.documents,
            "config.yaml": configs.dump(resolved(self.run)),
            "plan.yaml": configs.dump(self.run.plan),
            "data.json": json.dumps({**self.loader.state(), "step": step}),
        }


def check(run: Run) -> AnyProgram:
    """Refuse a run that cannot work, on shapes alone; return its program.

    Raises:
        ValueError: the mesh, a weight, the batch, the sequence length, a name.
    """
    remat_policy(run.plan.remat)
    check_kernel(run.plan.attention)
    if run.data.seq_len > run.model.max_positions:
        raise ValueError(
            f"data.seq_len {run.data.seq_len} is longer than model.max_positions {run.model.max_positions}; "
            f"set data.seq_len={run.model.max_positions} or model.max_positions={run.data.seq_len}"
        )
    if run.data.tokenizer == "bpe" and not run.init:
        check_vocabulary(run, run.data.vocab_size)
    program = make_program(run.model, make_optimizer(run.optimizer), run.plan, ramp=run.train.ramp)
    check_rates(run.optimizer.rates, program.params)
    if isinstance(program, PipelineProgram) and run.optimizer.name == "adafactor":
        raise ValueError(
            "optimizer.name adafactor scales a stack of layers as one, so that cut into stages it would not train as "
            "the whole; use adamw, muon or sgd, or schedule gpipe or interleaved with plan.pipeline.executor=spmd"
        )
    program.check_batch(run.data.batch_size, run.data.seq_len)
    _ = program.abstract_state  # checks every arrow against the layout
    return program


def check_vocabulary(run: Run, vocab_size: int) -> None:
    """Refuse a tokenizer that makes ids which the model's table lacks.

    Raises:
        ValueError: the tokenizer's vocabulary is larger than the model's.
    """
    if vocab_size > run.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, but model.vocab_size is {run.model.vocab_size}; "
            f"set model.vocab_size={vocab_size}"
        )


@contextlib.contextmanager
def _made(path: Path) -> Iterator[None]:
    """Make a directory; if what follows fails, remove again what is new."""
    try:
        new = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise ValueError(
            f"directory {path.parent} cannot be written ({error.strerror}); choose another with directory="
        ) from None
    try:
        yield
    except BaseException:
        for one in new:
            with contextlib.suppress(OSError):  # not empty: it holds something to keep
                one.rmdir()
        raise


def _chosen_step(run: Run, checkpoints: Checkpoints) -> int | None:
    """Return the step to start from, None for the start.

    Where the newest step was itself saved under this ``checkpoint.step``, the run went back before: it goes on.
    """
    steps, wanted = checkpoints.steps(), run.checkpoint.step
    if wanted < 0 or (steps and _wanted_then(checkpoints, steps[-1]) == wanted):
        return steps[-1] if steps else None
    if wanted not in steps:
        held = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"checkpoint.step {wanted} is not in {run.directory}/checkpoints; steps there: {held}")
    return wanted


def _wanted_then(checkpoints: Checkpoints, step: int) -> int | None:
    try:
        return configs.parse(checkpoints.texts(step)["config.yaml"], "config.yaml")["checkpoint"]["step"]
    except ValueError:  # damaged: one may want to go back behind it
        return None


def _check_fits(run: Run, program: AnyProgram, checkpoints: Checkpoints, step: int, changes: Sequence[str]) -> None:
    """Refuse a checkpoint of another model, optimizer or tokenizer.

    Raises:
        ValueError: names the changed settings, old -> new, and an array that does not fit.
    """
    advice = f"set it back, or start anew with another directory= than {run.directory}"
    try:
        checkpoints.check(step, program.abstract_state)
    except ValueError as error:
        causes = [line for line in changes if line.startswith(("model.", "optimizer."))]
        if not causes:
            raise
        example = str(error).partition("; ")[0]
        raise ValueError(f"not the model of the checkpoint: {'; '.join(causes)}; {advice}; {example}") from None
    keys = ("data.tokenizer:", "data.vocab_size:") if run.data.tokenizer == "bpe" else ("data.tokenizer:",)
    if causes := [line for line in changes if line.startswith(keys)]:
        raise ValueError(f"not the tokenizer of the checkpoint: {'; '.join(causes)}; {advice}")


def _open_data(run: Run, tokenizer: Tokenizer | None) -> Data:
    if tokenizer is None and run.data.tokenizer != "bpe":
        tokenizer = find_tokenizer(run.data, [])
    if tokenizer is not None:  # before the corpora are tokenised with it, which takes a while
        check_vocabulary(run, tokenizer.vocab_size)
    data = open_data(run.data, tokenizer)
    if jax.process_count() > 1:
        runtime.agree(json.dumps(data.fingerprint, sort_keys=True), "the data (corpora and tokenizer)")
    return data


def _begin(run: Run, program: AnyProgram, initial: Initial | None) -> tuple[Data, Any, Mapping[str, str]]:
    """Return data, state and documents of a run that starts anew.

    A tokenizer that the run names wins over that of the weights that it starts from. Its documents then replace theirs,
    all of them: of their ``config.json``, which stays, the ids of their own special tokens would be read.

    Raises:
        ValueError: as `_open_data`, or weights without a tokenizer and none named.
    """
    own = initial.tokenizer() if initial is not None and run.data.tokenizer == "bpe" else None
    if initial is not None and own is None and run.data.tokenizer == "bpe":
        raise ValueError(
            f"{run.init} has no tokenizer, and one trained here would not be its own; name it, as in "
            "data.tokenizer=tokenizer.json or data.tokenizer=bytes"
        )
    data = _open_data(run, own)
    state = program.init(run.train.seed) if initial is None else _from(initial, program, run.train.seed)
    if initial is None:
        return data, state, {"tokenizer.json": data.tokenizer.to_json()}
    carried = {k: v for k, v in initial.texts.items() if k not in OWN_TEXTS}
    if own is None:
        carried = {k: v for k, v in carried.items() if k not in TEXTS} | texts_of(data.tokenizer)
    return data, state, carried


def _from(initial: Initial, program: AnyProgram, seed: int) -> Any:
    return program.begin(initial.read(program.abstract_state.params), seed)


def _set_newer_aside(directory: Path, checkpoints: Checkpoints, step: int) -> list[str]:
    """Keep what lies beyond the step gone back to, with its metrics, where it no longer counts; say so."""
    runtime.barrier("all processes have chosen their step")
    aside = checkpoints.set_aside(step)
    if aside is None:
        return []
    if (directory / "metrics.jsonl").exists():
        shutil.copy(directory / "metrics.jsonl", Path(aside))
    return [f"the steps beyond {step} now lie in {aside}"]


def open_session(run: Run, initial: Initial | None = None) -> Session:
    """Open a run: from its newest checkpoint if its directory holds one, else from the start.

    Args:
        run: its config.
        initial: weights and tokenizer to start from; not looked at where there is a checkpoint.

    Raises:
        ValueError: whatever the user can mend, in one line; nothing on disk has been harmed.
    """
    program = check(run)
    path = Path(run.directory) / "checkpoints"
    with _made(path):
        checkpoints = Checkpoints(path, keep=run.checkpoint.keep, asynchronous=run.checkpoint.save == "async")
        step = _chosen_step(run, checkpoints)
        notes = [f"ignored unfinished checkpoint {name}" for name in checkpoints.incomplete()]
        if step is None:
            data, state, documents = _begin(run, program, initial)
            loader = data.train(program.rows(run.data.batch_size))
            notes += [f"started from {run.init}"] if initial is not None else []
        else:
            texts = checkpoints.texts(step)
            changes = configs.difference(configs.parse(texts["config.yaml"], "config.yaml"), resolved(run))
            _check_fits(run, program, checkpoints, step, changes)
            data = _open_data(run, tokenizer_of(texts))
            documents = {name: text for name, text in texts.items() if name not in OWN_TEXTS}
            loader = data.train(program.rows(run.data.batch_size), start_step=step)
            loader.restore(json.loads(texts["data.json"]))
            state = program.from_saved(checkpoints.restore(step, program.abstract_state))
            notes += [f"resumed from step {step}", *(f"changed since: {line}" for line in changes)]
            notes += _set_newer_aside(path.parent, checkpoints, step)
    if runtime.is_main():
        (path.parent / "config.yaml").write_text(configs.dump(resolved(run)))
        (path.parent / "tokenizer.json").write_text(data.tokenizer.to_json())
    return Session(run, program, data, loader, state, step or 0, checkpoints, tuple(notes), documents)
