"""Which layout serves a model best: ranked by predicted seconds and bytes, from arrows alone; nothing runs."""

from jaxpp.partition.rank import Ranking, rank_layouts

__all__ = ["Ranking", "rank_layouts"]
