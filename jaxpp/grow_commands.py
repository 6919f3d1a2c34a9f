"""``jaxpp grow``: any checkpoint into a larger model that computes the same function."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from jaxpp import runtime
from jaxpp.commands import bar, opened, refuse_overrides

if TYPE_CHECKING:
    from jaxpp.grow import Growth, Request
    from jaxpp.grow.write import Exam
    from jaxpp.pretrained import Checkpoint

TEXT_TOKENS = 2048  # of the text that both models are scored on
ROWS, LENGTH = 2, 64  # of the tokens whose logits are compared


def grow(arguments: argparse.Namespace) -> int:
    """Grow a checkpoint of any format into a larger model that computes the same function, and prove it."""
    refuse_overrides(arguments)
    checkpoint = opened(arguments)
    runtime.prepare(arguments.cpu_devices)
    from jaxpp.conversion import check_dtype
    from jaxpp.grow.report import show_proof
    from jaxpp.grow.run import has_moments
    from jaxpp.grow.write import grow as write

    growth = _request(arguments).growth(checkpoint.config)
    dtype = check_dtype(arguments.dtype) if arguments.dtype else None
    ours = checkpoint.format == "orbax" or growth.target.ladder_layers  # no published family holds a ladder
    to = arguments.to or ("orbax" if ours else "hf")
    carry = to == "orbax" and arguments.optimizer == "carry" and has_moments(checkpoint)
    total = _total(checkpoint, growth, carry, arguments, dtype)
    if arguments.dry_run or not arguments.target:
        return _describe(growth, total[0])
    exam = None if arguments.check == "off" else _exam(checkpoint, arguments)
    with bar("growing") as advance:
        proof = write(
            checkpoint, arguments.target, growth, to, exam=exam, carry=carry, mesh=arguments.mesh, dtype=dtype,
            family=arguments.family, overwrite=arguments.overwrite,
            progress=lambda count: advance(count, total[1]), say=_say,
        )  # fmt: skip
    if not runtime.is_main():
        return 0
    if proof is not None:
        print(show_proof(proof, checkpoint.tokenizer()))
    print(f"{checkpoint.name} is now {arguments.target} ({to}, {growth.target.num_layers} layers of "
          f"{growth.target.embed_dim}){_optimizer(checkpoint, carry, arguments.target)}")  # fmt: skip
    return 0


def _say(line: str) -> None:
    if runtime.is_main():
        print(line, file=sys.stderr)


def _request(arguments: argparse.Namespace) -> Request:
    from jaxpp.grow import Request

    noise = arguments.noise_db
    layers = tuple(int(word) for word in arguments.layers.split(",") if word.strip())
    return Request(
        width=arguments.width, embed_dim=arguments.embed_dim, operator=arguments.operator, variant=arguments.variant,
        noise_db=None if noise == "none" else _number("--noise-db", noise), heads=arguments.heads,
        kv_heads=arguments.kv_heads, head_dim=arguments.head_dim, mlp=arguments.mlp, vocab=arguments.vocab,
        depth=arguments.depth, depth_op=arguments.depth_op, layers=layers, experts=arguments.experts,
        top_k=arguments.top_k, granularity=arguments.granularity, drop=arguments.drop,
        ladder=arguments.ladder, ramp_steps=arguments.ramp_steps, target=arguments.to_size, seed=arguments.seed,
    )  # fmt: skip


def _number(name: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f'{name} "{word}": a number is needed, or none') from None


def _total(
    checkpoint: Checkpoint, growth: Growth, carry: bool, arguments: argparse.Namespace, dtype: str | None
) -> tuple[int, int]:
    """Return the bytes of the target's weights, and of all that is made."""
    from pathlib import Path

    from jaxpp.grow import Grown
    from jaxpp.grow.run import GrownRun
    from jaxpp.pretrained import Saved, stored_bytes

    weights = stored_bytes(Grown(checkpoint, growth), dtype or "")
    if not carry:
        return weights, weights
    assert isinstance(checkpoint, Saved)
    return weights, GrownRun(checkpoint, growth, Path(arguments.target or "."), arguments.mesh).num_bytes()


def _describe(growth: Growth, num_bytes: int) -> int:
    from jaxpp.grow.report import describe

    if runtime.is_main():
        print(describe(growth, num_bytes))
    return 0


def _optimizer(checkpoint: Checkpoint, carry: bool, target: str) -> str:
    from jaxpp.grow.run import has_moments

    if carry:
        return f"; its optimizer too: train on with jaxpp train {target}/config.yaml"
    return "; the optimizer starts anew" if has_moments(checkpoint) else ""


def _exam(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Exam:
    """Return what both models are run on: a text that was named or Python's documentation, else random tokens."""
    import numpy as np

    from jaxpp.data import CorpusConfig, read_documents
    from jaxpp.grow.write import Exam, some_tokens

    tokenizer, config = checkpoint.tokenizer(), checkpoint.config
    length = min(LENGTH, max(config.max_positions // 2, 1))
    if tokenizer is None:
        if arguments.text:
            raise ValueError(f"--text {arguments.text}: the checkpoint has no tokenizer; leave it out")
        return Exam(some_tokens(config.vocab_size, ROWS, length))
    documents = read_documents(CorpusConfig(arguments.text or "pydoc"), None)
    text = "\n\n".join(document.text for document in documents)[: 16 * TEXT_TOKENS]
    ids = tokenizer.encode(text, begin=True)[: ROWS * length]
    if len(ids) < ROWS * length:
        raise ValueError(f"--text {arguments.text} has {len(ids)} tokens; {ROWS * length} or more are needed")
    return Exam(np.asarray(ids, np.int32).reshape(ROWS, length), text, max_tokens=TEXT_TOKENS)


def add_parser(names: Any) -> argparse.ArgumentParser:
    """Add ``grow`` to the command line."""
    from jaxpp.grow.operators import DEPTH, WIDTH

    one = names.add_parser("grow", help=grow.__doc__, description=grow.__doc__)
    one.set_defaults(function=grow)
    one.add_argument("path", metavar="SRC", help="a checkpoint of any format, or a training run")
    one.add_argument("target", metavar="DST", nargs="?", default="", help="the directory to write; without: --dry-run")
    size = one.add_argument_group("sizes")
    size.add_argument("--width", type=float, default=0, help="residual stream, heads and mlp, times the old ones")
    size.add_argument("--embed-dim", type=int, default=0, help="the stream alone, to a size (lemon, net2net, aki, msg)")
    size.add_argument("--heads", type=int, default=0, help="query heads")
    size.add_argument("--kv-heads", type=int, default=0, help="key and value heads; by default whole groups")
    size.add_argument("--head-dim", type=int, default=0, help="size of a head, a multiple of the old one")
    size.add_argument("--mlp", type=int, default=0, help="width of the mlp, or of each expert")
    size.add_argument("--vocab", type=int, default=0, help="tokens")
    size.add_argument("--depth", type=int, default=0, help="layers")
    size.add_argument("--layers", default="", metavar="0,1,1,2", help="the source layer of each layer, for any order")
    size.add_argument("--experts", type=int, default=0, help="turn the mlp into this many experts")
    size.add_argument(
        "--ladder", type=int, default=0, metavar="K",
        help="the last K layers read the stream one branch earlier, so that all-reduces overlap; then train a little",
    )  # fmt: skip
    size.add_argument(
        "--target", dest="to_size", default="", metavar="PRESET", help="all sizes of a preset, e.g. llama-3.2-1b"
    )
    how = one.add_argument_group("how")
    how.add_argument("--operator", default="hypercloning", choices=WIDTH, help="of the width")
    how.add_argument("--variant", default="symmetric", choices=("symmetric", "diagonal"), help="weights over copies")
    how.add_argument("--noise-db", default="15", help="signal over the noise that tells copies apart, in dB; or none")
    how.add_argument("--depth-op", default="identity", choices=DEPTH, help="of the depth")
    how.add_argument("--top-k", type=int, default=2, help="experts that each token visits")
    how.add_argument("--granularity", type=int, default=1, help="parts that each expert is cut into")
    how.add_argument("--drop", type=float, default=0.0, help="fraction of each expert's units that is drawn anew")
    how.add_argument("--ramp-steps", type=int, default=1000, help="msg: steps in which new units fade in")
    how.add_argument("--seed", type=int, default=0, help="of noise and draws")
    how.add_argument("--optimizer", choices=("carry", "reset"), default="carry", help="of a training run")
    out = one.add_argument_group("output")
    out.add_argument("--dry-run", action="store_true", help="print sizes, maps and whether it is exact; read no weight")
    out.add_argument("--check", choices=("on", "off"), default="on", help="run source and target, and compare them")
    out.add_argument(
        "--text", default="", metavar="FILE", help="what both are scored on; by default Python's documentation"
    )
    out.add_argument(
        "--to", choices=("hf", "orbax"), help="by default hf, and orbax where the source is ours or --ladder is given"
    )
    out.add_argument("--family", default="", help="model_type to write, where several could hold the model")
    out.add_argument("--overwrite", action="store_true", help="replace a checkpoint that lies there")
    return one
