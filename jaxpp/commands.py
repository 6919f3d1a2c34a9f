"""What each command of the command line does, once its words are parsed. Returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpp import runtime

if TYPE_CHECKING:
    from jaxpp.pretrained import Checkpoint
    from jaxpp.serve.perplexity import Score


def opened(arguments: argparse.Namespace) -> Checkpoint:
    """Open the checkpoint that is named, and print what the user should know of it."""
    from jaxpp.pretrained import open_checkpoint

    checkpoint = open_checkpoint(arguments.path, frozenset(filter(None, arguments.accept.split(","))))
    for note in checkpoint.notes:
        print(f"note: {note}", file=sys.stderr)
    return checkpoint


@contextlib.contextmanager
def bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar in bytes on a terminal; ``advance(bytes, total)`` moves it."""
    if not sys.stderr.isatty() or not runtime.is_main():
        yield lambda num_bytes, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(words), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=None)
        yield lambda num_bytes, total: progress.update(task, advance=num_bytes, total=total)


def loaded(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Any:
    """Load the checkpoint that was opened onto the mesh that is named, with a bar."""
    from jaxpp.conversion import load
    from jaxpp.pretrained import stored_bytes

    runtime.prepare(arguments.cpu_devices)
    total = stored_bytes(checkpoint)
    with bar("reading") as advance:
        return load(
            checkpoint, arguments.mesh, dtype=arguments.dtype or None, quantize=arguments.quantize,
            progress=lambda count: advance(count, total),
        )  # fmt: skip


def add_draft(parser: Any) -> None:
    """Add the options of a draft, and of how the cache is split, to a command that runs the engine."""
    parser.add_argument(
        "--kv-split", default="heads", choices=("heads", "batch"),
        help="how axis tensor splits keys and values; batch where heads are few: slots are then a multiple of it too",
    )  # fmt: skip
    parser.add_argument("--draft", default="", metavar="CHECKPOINT", help="a small model that guesses tokens ahead")
    parser.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="tokens that it guesses at a time")


def loaded_draft(arguments: argparse.Namespace) -> Any:
    """Load the draft that is named, where the model is; None where there is none."""
    if not arguments.draft:
        return None
    given = argparse.Namespace(**{**vars(arguments), "path": arguments.draft})
    return loaded(given, opened(given))


def train(arguments: argparse.Namespace) -> int:
    """Train a run, from its newest checkpoint if there is one."""
    from jaxpp import config
    from jaxpp.initial import read_run
    from jaxpp.train.config import resolved
    from jaxpp.train.loop import Diverged, Trainer

    overrides = [*arguments.overrides, *([f"init={arguments.init}"] if arguments.init else [])]
    run, initial = read_run(arguments.path, overrides)
    if arguments.print_config:
        print(config.dump(resolved(run)), end="")
        return 0
    runtime.prepare(run.cpu_devices)
    try:
        Trainer(run, initial).fit()
    except Diverged as error:
        return fail(str(error), 1)
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Print every parameter with its arrow, sharding and bytes, and the memory that a step will take."""
    path = Path(arguments.path).expanduser()
    if path.suffix in (".yaml", ".yml") or _is_run(path):
        from jaxpp.initial import find_run
        from jaxpp.train.report import report

        run = find_run(arguments.path, arguments.overrides)
        runtime.prepare(run.cpu_devices)
        print(report(run, compiled=arguments.compile))
        return 0
    from jaxpp.describe import describe

    refuse_overrides(arguments)
    checkpoint = opened(arguments)
    runtime.prepare(arguments.cpu_devices)
    print(describe(checkpoint, arguments.mesh))
    return 0


def _is_run(path: Path) -> bool:
    """Say whether a directory holds a run that was trained, and not only weights."""
    from jaxpp import runs

    if not path.is_dir() or (path / "config.json").exists():
        return False
    try:
        source = runs.find_checkpoint(path)
    except ValueError:
        return False
    return (source.directory / str(source.step) / "data.json").exists()


def evaluate(arguments: argparse.Namespace) -> int:
    """Print perplexity and bits per byte of a checkpoint of any format on texts."""
    from jaxpp.data import CorpusConfig, read_documents
    from jaxpp.data.tokenizer import required
    from jaxpp.serve.perplexity import check_windows, score_texts, windows_for

    refuse_overrides(arguments)
    checkpoint, most = opened(arguments), arguments.max_documents
    tokenizer = required(checkpoint.tokenizer())
    windows = windows_for(checkpoint.config, arguments.window, arguments.stride, arguments.batch_size)
    check_windows(windows, checkpoint.config)
    documents = [document for source in arguments.text for document in read_documents(CorpusConfig(source), most)]
    model = loaded(arguments, checkpoint)
    scores = score_texts(model, tokenizer, [document.text for document in documents], windows, arguments.max_tokens)
    if runtime.is_main():
        print(_table([document.name for document in documents], scores))
    return 0


def _table(names: Sequence[str], scores: Sequence[Score], most: int = 20) -> str:
    """Return one line for each text, if they are at most `most`, and one for all of them."""
    from jaxpp.serve.perplexity import Score
    from jaxpp.train.report import columns

    rows: list[Sequence[str]] = [("text", "tokens", "bytes", "loss", "perplexity", "bits/byte")]
    named = list(zip(names, scores, strict=True)) if len(scores) <= most else []
    if len(scores) != 1:
        named.append((f"all {len(scores)}", sum(scores, Score())))
    for name, score in named:
        numbers = (f"{score.loss:.4f}", f"{score.perplexity:.2f}", f"{score.bits_per_byte:.4f}")
        rows.append((name, f"{score.num_tokens:,}", f"{score.num_bytes:,}", *numbers))
    return "\n".join(columns(rows, right=range(1, 6)))


def convert(arguments: argparse.Namespace) -> int:
    """Turn a checkpoint of any format into another: ours (orbax), or a directory that transformers loads (hf)."""
    from jaxpp.conversion import check_dtype, convert
    from jaxpp.pretrained import stored_bytes

    refuse_overrides(arguments)
    checkpoint = opened(arguments)
    runtime.prepare(arguments.cpu_devices)
    to = arguments.to or ("hf" if checkpoint.format == "orbax" else "orbax")
    dtype = check_dtype(arguments.dtype) if arguments.dtype else ""
    total = stored_bytes(checkpoint) + stored_bytes(checkpoint, dtype)
    with bar(f"to {to}") as advance:
        convert(
            checkpoint, arguments.target, to, mesh=arguments.mesh, dtype=dtype or None,
            family=arguments.family, max_file_bytes=arguments.max_file_gb * 1e9, overwrite=arguments.overwrite,
            reading=lambda count: advance(count, total), writing=lambda count: advance(count, total),
        )  # fmt: skip
    if runtime.is_main():
        print(f"{checkpoint.name} ({checkpoint.format}) is now {arguments.target} ({to})")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Compare loss and gradients over every legal mesh of the devices at hand; 1 if one differs."""
    from jaxpp.initial import find_run
    from jaxpp.train.verify import verify as compare

    run = find_run(arguments.path, arguments.overrides)
    runtime.prepare(run.cpu_devices)
    agree = compare(run, print)
    return 0 if agree else 1


def launch(arguments: argparse.Namespace) -> int:
    """Run another command of ours in several processes on this machine."""
    from jaxpp.launch import launch as start

    command = [sys.executable, "-m", "jaxpp.cli", *arguments.command]
    return start(command, arguments.processes, arguments.devices_per_process)


def doctor(arguments: argparse.Namespace) -> int:
    """Examine the installation, the devices and the processes, and name the fixes."""
    from jaxpp.doctor import examine, exit_code, render

    runtime.prepare(0)
    findings = examine()
    print(render(findings))
    return exit_code(findings)


def refuse_overrides(arguments: argparse.Namespace) -> None:
    """Refuse settings of a run where none is run.

    Raises:
        ValueError: naming them.
    """
    if arguments.overrides:
        raise ValueError(f"jaxpp {arguments.name} does not take {' '.join(arguments.overrides)}; see --help")


def fail(message: str, code: int) -> int:
    """Print one line on stderr and return the exit code."""
    print(f"jaxpp: {' '.join(message.split())}", file=sys.stderr)
    return code
