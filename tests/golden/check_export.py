"""Check directories that jaxpp wrote: does transformers load them, and does it compute the golden logits?

    .venv/golden/bin/python -m tests.golden.check_export DIR... [--case NAME] [--dtype bfloat16]

Run from the root of the repository in the environment that `make.py` describes. One line for each directory; the exit
status is 1 when a tensor is missing, unexpected or mis-shaped, or when a logit differs by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from tests.golden import reading, reference


def main() -> int:
    """Check every directory of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--case", choices=reading.cases(), help="compare with this golden case")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of a logit (default 1e-4)")
    arguments = parser.parse_args()
    failed = 0
    for directory in arguments.directories:
        model, problems = reference.open_model(directory, getattr(torch, arguments.dtype))
        line = f"{directory}: {type(model).__name__}, {'; '.join(problems) or 'every tensor used, none missing'}"
        wrong = bool(problems)
        if arguments.case:
            difference = largest_difference(model, reading.load(arguments.case))
            line += f"; largest logit difference to {arguments.case}: {difference:.2e}"
            wrong |= not difference <= arguments.tolerance
        print(f"{'FAILED' if wrong else 'ok':6} {line}")
        failed += wrong
    return 1 if failed else 0


def largest_difference(model: torch.nn.Module, golden: reading.Golden) -> float:
    """Compare every batch of a case: plain, padded and long."""
    arrays = golden.arrays
    padding = arrays["padding"]
    padded = reference.logits(model, arrays["padded_tokens"], padding)[padding == 1]
    pairs = [
        (reference.logits(model, arrays["tokens"]), arrays["logits"]),
        (padded, arrays["padded_logits"]),
    ]
    if "long_tokens" in arrays:
        pairs.append((reference.logits(model, arrays["long_tokens"]), arrays["long_logits"]))
    if any(ours.shape != theirs.shape for ours, theirs in pairs):
        return float("inf")
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)


if __name__ == "__main__":
    sys.exit(main())
