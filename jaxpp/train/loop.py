"""The training loop."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import runtime
from jaxpp.train.config import Run
from jaxpp.train.console import Console
from jaxpp.train.evaluate import evaluate
from jaxpp.train.metrics import MetricsLog, evaluation_line, memory_record, train_line
from jaxpp.train.optimizer import make_schedule
from jaxpp.train.session import Initial, Session, open_session
from jaxpp.train.stop import StopSignal


class Diverged(ArithmeticError):
    """The loss, the gradient or a weight is not finite; the last checkpoint is from before."""


class Trainer:
    """Trains a run to its last step, resuming by itself.

    Example:
        >>> from jaxpp.models import DecoderConfig
        >>> trainer = Trainer(Run(DecoderConfig(), directory="runs/first"))  # then: trainer.fit()
    """

    def __init__(self, run: Run, initial: Initial | None = None):
        """Keep the config; nothing is opened before `fit`.

        Args:
            run: the config.
            initial: a checkpoint to start from, as `jaxpp.pretrained.open_checkpoint` opens it.
        """
        self.run, self.initial = run, initial

    def fit(self) -> dict[str, Any]:
        """Train until ``run.train.num_steps`` updates are done, or a signal asks to stop.

        Returns:
            The last evaluation (``loss``, ``bits_per_byte``, ...) with ``step``; empty if stopped by a signal, if all
            steps were done before, or if nothing is held out.

        Raises:
            ValueError: the config does not fit itself, the devices, the data or the checkpoint.
            Diverged: the loss, the gradient or a weight is not finite.
        """
        with _Loop(open_session(self.run, self.initial)) as loop:
            return loop.run()


class _Loop:
    """One pass of `Trainer.fit`: the step, and what happens between steps."""

    def __init__(self, session: Session):
        self.session, self.config = session, session.run
        self.state: Any = session.state
        self.step = session.start
        self.rates, self.rows = session.rates, session.program.rows(self.config.data.batch_size)
        # All at once: evaluated step by step, each would wait on the device behind the step that is running.
        steps = jnp.arange(self.config.train.num_steps)
        self.learning_rates = np.asarray(jax.jit(jax.vmap(make_schedule(self.config.optimizer)))(steps))
        self.saved = session.start if session.start else -1
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._clock = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Loop:
        run, main = self.config, runtime.is_main()
        self._stack.callback(self.session.loader.close)
        self._stack.callback(self.session.checkpoints.close)
        self.signal = self._stack.enter_context(StopSignal(self.session.program.layout.mesh))
        self.console = self._stack.enter_context(Console(run.train.num_steps, self.step, main))
        self.log = MetricsLog(Path(run.directory), self.step) if main else None
        if self.log is not None:
            self._stack.callback(self.log.close)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def run(self) -> dict[str, Any]:
        """Run to the end, or to the step at which a signal arrives."""
        for note in self.session.notes:
            self.console.line(note)
        self._clock = time.perf_counter()
        every, last = self.config.checkpoint.every, self.config.train.num_steps
        if self.step >= last:
            self.console.line(f"step {self.step} is done already; raise train.num_steps above {self.step} to go on")
            return {}
        while self.step < last:
            if self.signal.agreed():
                return self._leave()
            self._profile()
            self._advance()
            if self.step % every == 0 and self.step < last:
                self.save()
            if self._evaluates() and self.step < last:
                self.evaluate()
        self.save()
        return self.evaluate()

    def _evaluates(self) -> bool:
        every = self.config.train.evaluate_every
        return every > 0 and self.step % every == 0

    def _advance(self) -> None:
        """Dispatch one step, then report the one before while this one runs."""
        data, program = self.config.data, self.session.program
        batch = program.place(dict(next(self.session.loader)), self.rows, data.batch_size)
        self.state, metrics = program.step(self.state, batch)
        self.step += 1
        self._report()
        self._pending = (self.step, metrics)

    def _report(self) -> None:
        """Wait for the pending step, check it, and write its line."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(f"step {step}: loss {loss}, gradient norm {norm}")
        if step % self.config.train.log_every == 0 or step == self.config.train.num_steps:
            record = {
                "step": step,
                "loss": loss,
                "lr": float(self.learning_rates[step - 1]),
                "grad_norm": norm,
                "seconds": seconds,
                **self.rates.at(seconds),
                **memory_record(),
            }
            self.console.line(train_line(record, self.config.train.num_steps))
            self._write("train", record)
        self.console.advance(step)

    def _diverged(self, what: str) -> Diverged:
        kept = f"the checkpoint of step {self.saved} is from before" if self.saved >= 0 else "nothing was saved yet"
        return Diverged(f"{what}; training stopped, {kept}")

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(kind, record)

    def save(self) -> None:
        """Save the state, its step known to be finite; a step that is on disk already is left alone."""
        self._report()
        if self.saved != self.step:
            program = self.session.program
            if not program.is_finite(self.state):
                raise self._diverged(f"step {self.step}: a weight is not finite after the update")
            self.session.checkpoints.save(self.step, program.to_save(self.state), self.session.texts(self.step))
            self.saved = self.step
        self._clock = time.perf_counter()

    def evaluate(self) -> dict[str, Any]:
        """Evaluate on held-out documents, if there are any."""
        self._report()
        session, train = self.session, self.config.train
        if session.data.num_held_out_tokens == 0:
            return {}
        found = evaluate(session.program, self.state, session.data, self.config.data.batch_size, train.evaluate_batches)
        record = {"step": self.step, **found}
        self.console.line(evaluation_line(record))
        self._write("eval", record)
        self._clock = time.perf_counter()
        return record

    def _leave(self) -> dict[str, Any]:
        self.save()
        self.session.checkpoints.wait()
        self.console.line(f"stopped by a signal at step {self.step}; saved, run the same command to go on")
        return {}

    def _profile(self) -> None:
        """Trace the steps asked for, leaving out the first two, which compile."""
        first, count = self.session.start + 2, self.config.train.profile_steps
        if count and self.step == first:
            self._report()
            jax.profiler.start_trace(str(Path(self.config.directory) / "profile"))
        if count and self.step == first + count:
            self._report()
            jax.profiler.stop_trace()
