"""Opening a run: every check that costs nothing first, then the data, then the state, new or restored.

What the user can get wrong is refused here, before any compile, and before anything on disk is touched.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxpp import config as configs
from jaxpp import dims, runtime, tree
from jaxpp.checkpoint import Checkpoints
from jaxpp.data import Data, Tokenizer, open_data
from jaxpp.data.loader import TrainLoader
from jaxpp.nn.attention import check_kernel
from jaxpp.nn.stack import remat_policy
from jaxpp.train.config import Run, resolved
from jaxpp.train.metrics import Rates, peak_flops_per_s
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.program import Program, TrainState, make_program


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
    """

    run: Run
    program: Program
    data: Data
    loader: TrainLoader
    state: TrainState
    start: int
    checkpoints: Checkpoints
    notes: tuple[str, ...]

    @property
    def rates(self) -> Rates:
        """What turns seconds into tokens/s and MFU."""
        run, mesh = self.run, self.program.layout.mesh
        return Rates(
            run.data.batch_size * run.data.seq_len,
            dims.flops_per_token(self.program.params, run.data.seq_len, run.plan.dims),
            mesh.size,
            peak_flops_per_s(mesh.devices.flat[0]),
        )

    def texts(self, step: int) -> dict[str, str]:
        """Return the documents that lie beside the arrays of the checkpoint of `step`."""
        return {
            "config.yaml": configs.dump(resolved(self.run)),
            "plan.yaml": configs.dump(self.run.plan),
            "tokenizer.json": self.data.tokenizer.to_json(),
            "data.json": json.dumps({**self.loader.state(), "step": step}),
        }


def check(run: Run) -> Program:
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
    if run.data.tokenizer == "bpe":
        check_vocabulary(run, run.data.vocab_size)
    program = make_program(run.model, make_optimizer(run.optimizer), run.plan)
    program.layout.check_batch(run.data.batch_size, run.data.seq_len, run.plan.microbatches)
    program.abstract_state  # noqa: B018 (checks every arrow against the layout)
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


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise ValueError(
            f"directory {path} cannot be written ({error.strerror}); choose another with directory="
        ) from None


def _chosen_step(run: Run, checkpoints: Checkpoints) -> int | None:
    if run.checkpoint.step < 0:
        return checkpoints.latest()
    if run.checkpoint.step not in checkpoints.steps():
        held = ", ".join(map(str, checkpoints.steps())) or "none"
        raise ValueError(
            f"checkpoint.step {run.checkpoint.step} is not in {run.directory}/checkpoints; steps there: {held}"
        )
    return run.checkpoint.step


def _check_fits(checkpoints: Checkpoints, step: int, state: TrainState) -> None:
    lines = tree.differences(checkpoints.contents(step), tree.named_leaves(state))
    if lines:
        raise ValueError(f"checkpoint: {lines[:6]}")


def _saved_tokenizer(texts: dict[str, str]) -> Tokenizer | None:
    return Tokenizer.from_json(texts["tokenizer.json"]) if "tokenizer.json" in texts else None


def open_session(run: Run) -> Session:
    """Open a run: from its newest checkpoint if its directory holds one, else from the start.

    Raises:
        ValueError: whatever the user can mend, in one line; nothing on disk has been harmed.
    """
    program = check(run)
    directory = Path(run.directory)
    _make_directory(directory)
    checkpoints = Checkpoints(
        directory / "checkpoints", keep=run.checkpoint.keep, asynchronous=run.checkpoint.save == "async"
    )
    step = _chosen_step(run, checkpoints)
    texts = checkpoints.texts(step) if step is not None else {}
    if step is not None:
        _check_fits(checkpoints, step, program.abstract_state)
    data = _open_data(run, texts)
    loader = data.train(program.rows(run.data.batch_size), start_step=step or 0)
    notes = [f"ignored unfinished checkpoint {name}" for name in checkpoints.incomplete()]
    if step is None:
        state = program.init(run.train.seed)
    else:
        loader.restore(json.loads(texts["data.json"]))
        state = checkpoints.restore(step, program.abstract_state)
        changes = configs.difference(configs.parse(texts["config.yaml"], "config.yaml"), resolved(run))
        notes += [f"resumed from step {step}", *(f"changed since: {line}" for line in changes)]
    if runtime.is_main():
        (directory / "config.yaml").write_text(configs.dump(resolved(run)))
        (directory / "tokenizer.json").write_text(data.tokenizer.to_json())
    return Session(run, program, data, loader, state, step or 0, checkpoints, tuple(notes))


def _open_data(run: Run, texts: dict[str, str]) -> Data:
    data = open_data(run.data, _saved_tokenizer(texts))
    check_vocabulary(run, data.vocab_size)
    if jax.process_count() > 1:
        runtime.agree(json.dumps(data.fingerprint, sort_keys=True), "the data (corpora and tokenizer)")
    return data
