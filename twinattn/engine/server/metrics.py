"""The numbers of a server, as Prometheus reads them: those of the engine, and how long its clients wait."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinattn.engine.engine_thread import Answer, EngineThread, Piece

LATENCIES = [0.001 * 2**i for i in range(16)]  # seconds, 1 ms to 33 s


class Metrics:
    """All numbers, of one engine's thread.

    Args:
        thread: the engine's thread.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineMetrics(thread))
        self._first = self._latency("time_to_first_token", "From a request to its first token.")
        self._next = self._latency("inter_token_latency", "From a token of a request to its next one.")
        self._whole = self._latency("e2e_request_latency", "From a request to its end.")
        self._ended = Counter(
            "fastattn_requests", "Requests by how they ended.", ["finish_reason"], registry=self._registry
        )

    def _latency(self, name: str, text: str) -> Histogram:
        return Histogram(f"fastattn_{name}_seconds", text, buckets=LATENCIES, registry=self._registry)

    def text(self) -> bytes:
        """Return all numbers in Prometheus' text."""
        return generate_latest(self._registry)

    def observe(self, answer: Answer, before: float | None, piece: Piece) -> float | None:
        """Count a piece of an answer.

        Args:
            answer: the answer.
            before: when its last token came; None if none has.
            piece: the next piece.

        Returns:
            When its last token has come now; None if none has.
        """
        for _ in piece.token_ids:
            if before is None:
                self._first.observe(piece.time - answer.arrived)
            else:
                self._next.observe(piece.time - before)
            before = piece.time
        if piece.finish_reason is not None:
            self._ended.labels(piece.finish_reason).inc()
            self._whole.observe(time.perf_counter() - answer.arrived)
        return before


class EngineMetrics(Collector):
    """Reads the numbers of an engine when asked; they may be from the middle of a step."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread

    def collect(self) -> Iterator[Metric]:
        """Yield each number with its name and what it says."""
        engine = self.thread.engine
        counters, pool = engine.counters, engine.pool
        gauges = {
            "num_requests_running": (len(engine.running), "Requests that run."),
            "num_requests_waiting": (self.thread.num_waiting, "Requests that wait: the length of the queue."),
            "kv_blocks": (len(pool.users), "Blocks in the pool."),
            "kv_blocks_used": (len(pool.users) - len(pool.free), "Blocks that requests use."),
        }
        totals = {
            "steps": (counters.steps, "Forward passes."),
            "computed_tokens": (counters.computed_tokens, "Tokens that went through the model."),
            "prompt_chunks": (counters.chunks, "Chunks of prompts, and of requests to compute again."),
            "prefix_cache_hit_tokens": (
                counters.cached_tokens,
                "Tokens that did not go through it: their blocks were cached.",
            ),
            "prefix_cache_hit_blocks": (counters.cached_blocks, "Blocks that were found in the prefix cache."),
            "preemptions": (counters.preemptions, "How often a request lost its blocks to an older one."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"fastattn_{name}", text, value)
        for name, (value, text) in totals.items():
            yield CounterMetricFamily(f"fastattn_{name}", text, value)
