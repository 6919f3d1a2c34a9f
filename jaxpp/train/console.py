"""What a person sees while a run goes on: a progress bar on a terminal, plain lines when piped."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Console:
    """Prints lines, and on a terminal keeps a progress bar below them. Silent where `active` is false."""

    def __init__(self, num_steps: int, start: int, active: bool = True):
        """Prepare a bar from `start` to `num_steps`.

        Args:
            num_steps: of the whole run.
            start: steps done before.
            active: False on all processes but the first.
        """
        self._active, self._start, self._num_steps = active, start, num_steps
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Console:
        if self._active and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, transient=True)
            self._progress.start()
            self._task = self._progress.add_task("training", total=self._num_steps, completed=self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def line(self, text: str) -> None:
        """Print one line."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
