"""Whether the head of a published checkpoint is the embedding table: its config against its files."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from jaxpp.convert.tensors import TensorFiles
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family

TABLE, HEAD = "tokens/table", "head/kernel"
_ROWS = 4096  # compared at once


@dataclass(frozen=True)
class Settled:
    """What was decided.

    Args:
        config: tied or not.
        copies: tensors that only repeat the table.
        notes: what the user should know.
    """

    config: DecoderConfig
    copies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of the copies."""
        return tuple(f"^{re.escape(name)}$" for name in self.copies)


def settle_head(family: Family, config: DecoderConfig, files: TensorFiles) -> Settled:
    """Decide whether the head is tied.

    Where the config ties it, a head in the files that equals the table is left, and one that differs is kept: then the
    model is not tied, and a note says so (as transformers 5 does; its version 4 ties, and loses the head).

    Raises:
        ValueError: the config does not tie it and the files hold none: a head drawn at random would go unnoticed.
    """
    names = files.names()
    forms = [part.name() for part in family.tensors(replace(config, tied=False))[HEAD]]
    head = next((name for name in forms if name in names), forms[0])
    if not config.tied:
        if head not in names and not any("head" in name or "embed_out" in name for name in names):
            raise ValueError(
                f"{head} is missing, and the config does not tie the head to the embedding table; "
                'if it shall be tied, add "tie_word_embeddings": true to config.json'
            )
        return Settled(config)
    if head not in names:
        return Settled(config)
    table = family.tensors(config)[TABLE][0].name()
    if table in names and _equal(files.read(table), files.read(head)):
        return Settled(config, (head,))
    note = (
        f"the config ties the head to the embedding table, but {head} differs from it: the file's head is kept, untied"
    )
    return Settled(replace(config, tied=False), (), (note,))


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return all(
        np.array_equal(left[i : i + _ROWS].view(np.uint8), right[i : i + _ROWS].view(np.uint8))
        for i in range(0, len(left), _ROWS)
    )
