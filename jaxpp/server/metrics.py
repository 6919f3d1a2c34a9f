"""What a server tells Prometheus. The only door to prometheus_client.

Counts of the engine are read when they are asked for; times are recorded as answers go by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        engine: whose ``statistics()`` are shown.
    """

    def __init__(self, engine: Any) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._registry = CollectorRegistry()
        self._registry.register(_EngineCounts(engine))
        self._first = Histogram(
            "jaxpp_time_to_first_token_seconds", "From a request to its first token.",
            buckets=_FIRST_TOKEN_S, registry=self._registry,
        )  # fmt: skip
        self._next = Histogram(
            "jaxpp_inter_token_seconds", "From one token to the next of the same request.",
            buckets=_NEXT_TOKEN_S, registry=self._registry,
        )  # fmt: skip
        self._whole = Histogram(
            "jaxpp_request_seconds", "From a request to its end.", ("reason",),
            buckets=_WHOLE_S, registry=self._registry,
        )  # fmt: skip
        self._responses = Counter("jaxpp_http_responses", "HTTP responses.", ("route", "code"), registry=self._registry)

    def first_token(self, seconds: float) -> None:
        """Record how long a first token took."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Record how long the next tokens took, together."""
        for _ in range(count):
            self._next.observe(seconds / count)

    def whole(self, seconds: float, reason: str) -> None:
        """Record how long a request took, and why it ended."""
        self._whole.labels(reason).observe(seconds)

    def response(self, route: str, code: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(route, str(code)).inc()

    def render(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _EngineCounts:
    """The engine's own counts, as a collector of prometheus_client."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def describe(self) -> list[Any]:
        """Name nothing in advance: the engine may still be starting."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the counts as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._engine.statistics()
        gauges = {
            "jaxpp_requests_waiting": ("Requests in the queue.", now.num_waiting),
            "jaxpp_requests_running": ("Requests that hold a slot.", now.num_running),
            "jaxpp_slots": ("Requests that can run at once.", now.num_slots),
            "jaxpp_cache_pages_used": ("Pages of the cache that hold something.", now.pages_used),
            "jaxpp_cache_pages": ("Pages of the cache.", now.num_pages),
        }
        counters = {
            "jaxpp_prompt_tokens": ("Tokens of prompts.", now.prompt_tokens),
            "jaxpp_cached_prompt_tokens": ("Tokens of prompts that were in the cache.", now.cached_prompt_tokens),
            "jaxpp_new_tokens": ("Tokens of answers.", now.new_tokens),
            "jaxpp_guessed_tokens": ("Tokens that a draft guessed.", now.guessed_tokens),
            "jaxpp_right_tokens": ("Guessed tokens that the model drew too.", now.right_tokens),
        }
        for name, (words, value) in gauges.items():
            yield GaugeMetricFamily(name, words, value)
        for name, (words, value) in counters.items():
            yield CounterMetricFamily(name, words, value)
        finished = CounterMetricFamily("jaxpp_requests_finished", "Requests that ended.", labels=("reason",))
        for reason in ("stop", "length", "cancelled", "timeout", "error"):
            finished.add_metric((reason,), now.finished.get(reason, 0))
        yield finished
