"""``jaxpp schedule draw | compare | profile``: pictures and numbers of pipeline schedules.

The first two need no hardware and start no JAX devices; the third measures what the layers of a model cost.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpp.quantities import parse_bytes, show_bytes, show_time
from jaxpp.schedule import SCHEDULES, build, simulate, unit_costs
from jaxpp.schedule.compare import compare
from jaxpp.schedule.compare_text import compared
from jaxpp.schedule.costs_file import read_costs, write_costs
from jaxpp.schedule.draw import FORMATS, save
from jaxpp.schedule.layer_costs import ModelCosts, Transfer, costs_of
from jaxpp.schedule.picture import title_of
from jaxpp.schedule.simulate import Timeline
from jaxpp.schedule.text import text

PIPED_WIDTH = 120


def add_parser(names: Any) -> Any:
    """Add ``schedule`` to the commands.

    Args:
        names: what ``add_subparsers`` returned.

    Returns:
        The same of ``schedule``, for further commands below it.
    """
    summary = "Draw pipeline schedules, and compare them, without hardware; measure what they are made of."
    parser = names.add_parser("schedule", help=summary, description=summary)
    below = parser.add_subparsers(dest="schedule_command", required=True, metavar="COMMAND")
    one = _add(below, "draw", draw)
    one.add_argument("schedule", metavar="NAME", help=", ".join(SCHEDULES))
    _add_counts(one)
    one.add_argument("--chunks", type=int, help="stages that each rank runs for one microbatch")
    one.add_argument("--waves", type=int, help="of hanayo: times that a microbatch goes to the last rank and back")
    one.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="any option of the schedule")
    one.add_argument("--cuts", default="", metavar="3,5", help="layers of each stage; as even as may be by default")
    one.add_argument("--out", default="", metavar="FILE", help=f"{', '.join(FORMATS)}; a trace is .json; else printed")
    one.add_argument("--width", type=int, default=0, help="columns of what is printed; the terminal's by default")
    _add_counts(_add(below, "compare", compare_all))
    below.choices["compare"].add_argument("--memory", default="", metavar="4GiB", help="what a rank has; needs --costs")
    one = _add(below, "profile", profile)
    one.epilog = "settings such as plan.mesh=stage:4 data.batch_size=32 (--key value works too)"
    one.add_argument("path", metavar="RUN.yaml|CHECKPOINT")
    one.add_argument("--out", default="costs.yaml", metavar="FILE", help="replaced if there; costs.yaml by default")
    one.add_argument("--repeats", type=int, default=10, help="samples of the longest operation; 10 by default")
    return below


def draw(arguments: argparse.Namespace) -> int:
    """Draw a schedule: as text, or into a picture or trace."""
    timeline, unit = _timeline(arguments)
    if arguments.out:
        print(f"{title_of(timeline, unit)}\nwritten to {save(timeline, arguments.out, unit)}")
        return 0
    width = arguments.width or shutil.get_terminal_size((PIPED_WIDTH, 0)).columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(text(timeline, width=width, colour=colour, unit=unit), end="")
    return 0


def compare_all(arguments: argparse.Namespace) -> int:
    """Print all schedules side by side, and name the best."""
    costs = read_costs(arguments.costs) if arguments.costs else None
    limit = parse_bytes(arguments.memory) if arguments.memory else None
    rows = compare(arguments.ranks, arguments.microbatches, costs, limit)
    print(f"{arguments.ranks} ranks, {arguments.microbatches} microbatches\n")
    print(compared(rows, "s" if costs else ""), end="")
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Measure what the layers of a run's model cost on these devices, and write it for draw and compare --costs."""
    from jaxpp import runtime
    from jaxpp.initial import find_run
    from jaxpp.train.profile import advised_cuts
    from jaxpp.train.profile import profile as measure

    run = find_run(arguments.path, arguments.overrides)
    runtime.prepare(run.cpu_devices)
    if runtime.is_main():
        _check_writable(Path(arguments.out))
    costs = measure(run, arguments.repeats)
    if runtime.is_main():
        command = f"jaxpp schedule profile {' '.join([arguments.path, *arguments.overrides])}"
        write_costs(arguments.out, replace(costs, measured={**costs.measured, "command": command}))
        print(_profiled(costs))
        ranks = run.plan.layout().mesh.shape.get("stage", 1)
        sizes = (ranks, run.plan.pipeline.microbatches or ranks) if ranks > 1 else ("R", "M")
        reader = "jaxpp schedule compare --ranks {} --microbatches {}".format(*sizes)
        if 1 < ranks <= costs.num_layers:
            cuts = list(advised_cuts(costs, ranks))
            print(f"one stage on each of {ranks} ranks: plan.pipeline.cuts={cuts} balances them")
        print(f"written to {arguments.out}; {reader} --costs {arguments.out} reads it")
    return 0


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    where = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"--out {path} is a directory; name a file in it, {path / 'costs.yaml'} say")
    if not where.is_dir():
        raise ValueError(f"--out {path}: there is no directory {where}; make it first, or name another file")
    if not os.access(path if path.exists() else where, os.W_OK):
        raise ValueError(f"--out {path} cannot be written (no permission); name another file")


def _profiled(costs: ModelCosts) -> str:
    """Return measured costs as a table."""
    from jaxpp.train.report import columns

    layer, measured = costs.layers[0], costs.measured
    parts = {f"layer, one of {costs.num_layers}": layer, "embedding": costs.embedding, "head and loss": costs.head}
    names = ("forward", "input gradient", "weight gradient", "fused", "recompute", "activations", "weights")
    rows: list[Sequence[str]] = [("", *names)]
    for name, part in parts.items():
        times = (part.forward_s, part.input_gradient_s, part.weight_gradient_s, part.fused_s, part.recompute_s)
        counts = (part.activation_bytes, part.weight_bytes)
        rows.append((name, *(show_time(time or 0.0) for time in times), *map(show_bytes, counts)))
    gradients = (layer.input_gradient_s, layer.weight_gradient_s)
    ratio = " : ".join(f"{seconds / layer.forward_s:.2f}" if layer.forward_s else "?" for seconds in gradients)
    link = costs.transfer
    return "\n".join([
        f"{measured['device']}, mesh {measured['mesh']}; for one microbatch of {measured['microbatch']}, "
        f"{measured['compute_dtype']}, remat {measured['remat']}",
        "",
        *columns(rows, right=range(1, 8)),
        "",
        f"F : B : W = 1 : {ratio} of a layer",
        f"transfer of {show_bytes(link.bytes)}: {_link(link)}{measured['transfer']}",
    ])  # fmt: skip


def _link(link: Transfer) -> str:
    if not link.seconds:
        return ""
    rate = f", then {show_bytes(link.bytes_per_s)}/s" if math.isfinite(link.bytes_per_s) else ""
    return f"{show_time(link.seconds)} (latency {show_time(link.latency_s)}{rate}) "


def _timeline(arguments: argparse.Namespace) -> tuple[Timeline, str]:
    """Return the timeline that is asked for, and the unit of its times."""
    options = dict(map(_option, arguments.option))
    if arguments.waves is not None:
        options["waves"] = arguments.waves
    schedule = build(arguments.schedule, arguments.ranks, arguments.microbatches, arguments.chunks, **options)
    label = " ".join([schedule.name, *(f"{key}={value}" for key, value in options.items())])
    if arguments.costs:
        costs = costs_of(schedule, read_costs(arguments.costs), _cuts(arguments.cuts))
    elif arguments.cuts:
        raise ValueError("--cuts needs --costs: without costs of layers all stages are alike")
    else:
        costs = unit_costs(schedule, recompute=1.0)
    return simulate(replace(schedule, name=label), costs), "s" if arguments.costs else ""


def _add(names: Any, name: str, function: Any) -> argparse.ArgumentParser:
    parser = names.add_parser(name, help=function.__doc__, description=function.__doc__)
    parser.set_defaults(function=function)
    return parser


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, required=True, help="places of the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="parts of the batch")
    parser.add_argument(
        "--costs", default="", metavar="costs.yaml", help="measured costs; all operations alike without"
    )


def _option(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not key or not equals or not value:
        raise ValueError(f'--option "{word}" is no key=value; write --option waves=2')
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _cuts(words: str) -> Sequence[int] | None:
    if not words:
        return None
    parts = words.replace("+", ",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f'--cuts "{words}": whole numbers of layers are needed, one for each stage, e.g. --cuts 3,5')
    return tuple(map(int, parts))
