"""The command line: ``jaxpp train | inspect | generate | verify | launch | doctor``.

Exit codes: 0 done, 2 the user's mistake (one line on stderr), 1 ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxpp import runtime
from jaxpp.cluster import detect_cluster

OVERRIDES = "settings such as train.num_steps=20 plan.mesh='data:2 tensor:4' (--key value works too)"


def _prepare(cpu_devices: int) -> None:
    """Start the processes, with made-up CPU devices where asked for and where no launcher has set them."""
    launched = "JAXPP_COORDINATOR_ADDRESS" in os.environ or detect_cluster(os.environ) is not None
    if cpu_devices and not launched:
        runtime.fake_devices(cpu_devices)
    runtime.initialize()


def _run_of(arguments: argparse.Namespace):
    from jaxpp import runs

    path = Path(arguments.path)
    if path.is_dir():
        return runs.find_checkpoint(path).run(arguments.overrides)
    return runs.read_run(path, arguments.overrides)


def train(arguments: argparse.Namespace) -> int:
    """Train a run, from its newest checkpoint if there is one."""
    from jaxpp import config, runs
    from jaxpp.train.config import resolved
    from jaxpp.train.loop import Diverged, Trainer

    run = runs.read_run(arguments.path, arguments.overrides)
    if arguments.print_config:
        print(config.dump(resolved(run)), end="")
        return 0
    _prepare(run.cpu_devices)
    try:
        Trainer(run).fit()
    except Diverged as error:
        return _fail(str(error), 1)
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Print every parameter with its arrow, sharding and bytes, and the memory that a step will take."""
    from jaxpp.train.report import report

    run = _run_of(arguments)
    _prepare(run.cpu_devices)
    print(report(run, compiled=arguments.compile))
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Continue a prompt with a checkpoint's model."""
    from jaxpp import runs
    from jaxpp.serve.sample import sample

    source = runs.find_checkpoint(arguments.path)
    run = source.run(arguments.overrides)
    _prepare(run.cpu_devices if arguments.mesh else 0)
    pieces = sample(
        run.model, source.directory, source.step, arguments.prompt, mesh=arguments.mesh or "data:1",
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, top_k=arguments.top_k,
        seed=arguments.seed,
    )  # fmt: skip
    print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Compare loss and gradients over every legal mesh of the devices at hand; 1 if one differs."""
    from jaxpp.train.verify import verify as compare

    run = _run_of(arguments)
    _prepare(run.cpu_devices)
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

    _prepare(0)
    findings = examine()
    print(render(findings))
    return exit_code(findings)


def _add(commands, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").strip()
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(function=function)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxpp", description="Train, grow and shard language models on JAX meshes.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    one = _add(commands, "train", train)
    one.add_argument("path", metavar="RUN.yaml")
    one.add_argument("--print_config", action="store_true", help="print the resolved config and stop")
    one = _add(commands, "inspect", inspect)
    one.add_argument("path", metavar="RUN.yaml|CHECKPOINT")
    one.add_argument("--compile", action="store_true", help="compile the step too, and print the compiler's own memory")
    one = _add(commands, "generate", generate)
    one.add_argument("path", metavar="CHECKPOINT")
    one.add_argument("--prompt", required=True)
    one.add_argument("--max_new_tokens", type=int, default=100)
    one.add_argument("--temperature", type=float, default=0.8)
    one.add_argument("--top_k", type=int, default=50)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--mesh", default="", help="e.g. 'tensor:4'; one device by default")
    one = _add(commands, "verify", verify)
    one.add_argument("path", metavar="RUN.yaml|CHECKPOINT")
    one = _add(commands, "launch", launch)
    one.add_argument("--processes", type=int, required=True)
    one.add_argument("--devices-per-process", type=int, default=1)
    one.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="e.g. -- train RUN.yaml")
    _add(commands, "doctor", doctor)
    for taking in ("train", "inspect", "generate", "verify"):
        commands.choices[taking].epilog = OVERRIDES
    return parser


def _fail(message: str, code: int) -> int:
    print(f"jaxpp: {' '.join(message.split())}", file=sys.stderr)
    return code


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words; what the parser does not know is an override."""
    arguments, rest = parser.parse_known_args(words)
    if rest and not hasattr(arguments, "path"):
        parser.error(f"{arguments.name} does not take {' '.join(rest)}")
    arguments.overrides = rest
    if arguments.name == "launch":
        arguments.command = [word for i, word in enumerate(arguments.command) if i or word != "--"]
        if not arguments.command:
            parser.error("launch needs a command, e.g. jaxpp launch --processes 2 -- train RUN.yaml")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _split(_parser(), sys.argv[1:] if words is None else words)
    code = _run(arguments)
    if code and jax.distributed.is_initialized():
        runtime.leave(code)  # at once: the others may be waiting for this process
    return code


def _run(arguments: argparse.Namespace) -> int:
    try:
        return arguments.function(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # OSError: a full disk, a process that did not come
        if os.environ.get("JAXPP_TRACEBACK"):
            raise
        return _fail(str(error), 2 if isinstance(error, ValueError) else 1)


if __name__ == "__main__":
    sys.exit(main())
