"""Using trained weights: the engine that answers requests, its sampler, its cache, and the server in front of it."""

from jaxpp.partition import Ranking, rank_layouts
from jaxpp.serve.engine import Answer, Engine, Statistics
from jaxpp.serve.request import Delta, QueueFull, Sampling, Token

__all__ = [
    "Answer", "Delta", "Engine", "QueueFull", "Ranking", "Sampling", "Statistics", "Token", "rank_layouts",
]  # fmt: skip
