"""``jaxpp shard``: how a checkpoint would best lie on a mesh, for prompts and for decoding; no weight is read."""

from __future__ import annotations

import argparse
from typing import Any

from jaxpp import runtime
from jaxpp.commands import opened, refuse_overrides


def shard(arguments: argparse.Namespace) -> int:
    """Rank the layouts of a checkpoint on a mesh by predicted time, for prompts and for decoding; reads no weight."""
    refuse_overrides(arguments)
    from jaxpp.partition.rank import rank_layouts

    checkpoint = opened(arguments)
    runtime.prepare(0)
    ranking = rank_layouts(
        checkpoint.config, arguments.mesh, batch=arguments.batch, context=arguments.context, device=arguments.device,
        prompt=arguments.prompt or None, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype or None,
        objective=arguments.objective,
    )  # fmt: skip
    if runtime.is_main():
        print(f"{checkpoint.name}\n{ranking}")
    return 0


def add_parser(names: Any) -> argparse.ArgumentParser:
    """Add ``shard`` to the command line."""
    from jaxpp.partition.device_kinds import DEVICE_KINDS

    one = names.add_parser("shard", help=shard.__doc__, description=shard.__doc__)
    one.set_defaults(function=shard)
    one.add_argument("path", metavar="CKPT", help="a checkpoint of any format, or a training run")
    one.add_argument(
        "--mesh",
        required=True,
        metavar="tensor:8",
        help="data and tensor, or tensor_x tensor_y tensor_z; need not exist",
    )
    one.add_argument("--batch", type=int, default=1, help="sequences at once, on the whole mesh; 1 by default")
    one.add_argument("--context", type=int, required=True, help="tokens of each that the cache has room for")
    one.add_argument("--prompt", type=int, default=0, help="tokens of each prompt, read in one step; default: context")
    one.add_argument("--device", default="h200", metavar="KIND", help=", ".join(DEVICE_KINDS))
    one.add_argument("--dtype", default="bfloat16", help="of weights: float32, bfloat16, float16, int8 or int4")
    one.add_argument("--kv-dtype", default="", help="of keys and values; by default that of the activations")
    one.add_argument(
        "--objective", choices=("latency", "cost"), default="latency",
        help="time of a step, or device time of a token with as many sequences as fit",
    )  # fmt: skip
    one.add_argument("--accept", default="", metavar="A,B", help="attributes of config.json that may stay unread")
    return one
