"""The command line: ``jaxpp train | inspect | convert | grow | shard | generate | serve | eval | verify | ...``.

Exit codes: 0 done, 2 the user's mistake (one line on stderr), 1 ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import jax

from jaxpp import (
    commands,
    generate_commands,
    grow_commands,
    runtime,
    schedule_commands,
    serve_commands,
    shard_commands,
)

OVERRIDES = "settings such as train.num_steps=20 plan.mesh='data:2 tensor:4' (--key value works too)"


def _add(names, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").strip()
    parser = names.add_parser(name, help=summary, description=summary)
    parser.set_defaults(function=function)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxpp", description="Train, grow and shard language models on JAX meshes.")
    names = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    one = _add(names, "train", commands.train)
    one.add_argument("path", metavar="RUN.yaml")
    one.add_argument("--init", default="", metavar="CHECKPOINT", help="start from a checkpoint of any format")
    one.add_argument("--print_config", action="store_true", help="print the resolved config and stop")
    one = _add(names, "inspect", commands.inspect)
    one.add_argument("path", metavar="RUN.yaml|CHECKPOINT")
    one.add_argument("--compile", action="store_true", help="compile the step too, and print the compiler's own memory")
    _add_loading(one)
    one = _add(names, "convert", commands.convert)
    one.add_argument("path", metavar="CHECKPOINT")
    one.add_argument("target", metavar="DIRECTORY")
    one.add_argument("--to", choices=("orbax", "hf"), help="by default orbax, and hf where the source is orbax")
    one.add_argument("--family", default="", help="model_type to write, where several could hold the model")
    one.add_argument("--max_file_gb", type=float, default=5.0, help="largest safetensors file, in 10^9 bytes")
    one.add_argument("--overwrite", action="store_true", help="replace a checkpoint that lies there")
    _add_loading(one)
    one = _add(names, "eval", commands.evaluate)
    one.add_argument("path", metavar="CHECKPOINT")
    one.add_argument(
        "--text", nargs="+", required=True, metavar="FILE", help="files, directories, globs, stdlib, pydoc"
    )
    one.add_argument(
        "--window", type=int, default=0, help="tokens that the model sees at once; by default 512, or all it takes"
    )
    one.add_argument("--stride", type=int, default=0, help="new tokens of each window; half of it by default")
    one.add_argument("--batch_size", type=int, default=8, help="windows run at once")
    one.add_argument("--max_tokens", type=int, default=0, help="tokens of each document; all by default")
    one.add_argument("--max_documents", type=int, help="documents of each source; all by default")
    _add_loading(one, quantize=True)
    _add_loading(generate_commands.add_parser(names), quantize=True)
    _add_loading(serve_commands.add_parser(names), quantize=True)
    shard_commands.add_parser(names)
    one = _add(names, "verify", commands.verify)
    one.add_argument("path", metavar="RUN.yaml|CHECKPOINT")
    _add_loading(grow_commands.add_parser(names))
    schedule_commands.add_parser(names)
    one = _add(names, "launch", commands.launch)
    one.add_argument("--processes", type=int, required=True)
    one.add_argument("--devices-per-process", type=int, default=1)
    one.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="e.g. -- train RUN.yaml")
    _add(names, "doctor", commands.doctor)
    for taking in ("train", "inspect", "verify"):
        names.choices[taking].epilog = OVERRIDES
    return parser


def _add_loading(parser: argparse.ArgumentParser, *, quantize: bool = False) -> None:
    parser.add_argument("--mesh", default="data:1", help="where the weights go, e.g. 'tensor:4'; one device by default")
    parser.add_argument("--dtype", default="", help="of the weights: float32, bfloat16, float16; by default as stored")
    parser.add_argument("--cpu_devices", type=int, default=0, help="run on this many made-up CPU devices")
    parser.add_argument("--accept", default="", metavar="A,B", help="attributes of config.json that may stay unread")
    if quantize:
        parser.add_argument("--quantize", default="", metavar="int8|int4", help="weights while they are read")


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
        return commands.fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # OSError: a full disk, a process that did not come
        if os.environ.get("JAXPP_TRACEBACK"):
            raise
        return commands.fail(str(error), 2 if isinstance(error, ValueError) else 1)


if __name__ == "__main__":
    sys.exit(main())
