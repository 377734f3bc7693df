"""Prometheus metrics of the server, by vLLM's names where they mean the same, so that its dashboards show them."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxglue.serve.service import Service

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Counts and times of one server's requests.

    Args:
        service: whose queue and cache are shown; None for a model that writes no text.
    """

    def __init__(self, service: Service | None):
        self._registry = CollectorRegistry()
        self._service, model = service, ("model_name",)
        self.responses = self._counter("http_requests", "HTTP responses.", ("method", "handler", "status"))
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.", model)
        self._new = self._counter("vllm:generation_tokens", "Tokens of answers.", model)
        self._ended = self._counter("vllm:request_success", "Answers that ended.", (*model, "finished_reason"))
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", model)
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.", model)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Time to an answer's first token.", _SECONDS)
        self._each = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _TOKEN_SECONDS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Time to a request's end.", _SECONDS)
        self._lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        if service is None:
            return
        gauges = {
            "vllm:num_requests_running": ("Answers that decode.", lambda: service.running),
            "vllm:num_requests_waiting": ("Answers that wait for their turn.", lambda: service.waiting),
            "vllm:kv_cache_usage_perc": ("Share of the cache's pages in use.", lambda: service.cache_use),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(value)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=bounds, registry=self._registry)

    def begin(self, model: str, lengths: Sequence[int]) -> None:
        """Count the prompts of a request, of so many tokens."""
        self._prompt.labels(model).inc(sum(lengths))
        for length in lengths:
            self._lengths.labels(model).observe(length)

    def first(self, model: str, seconds: float) -> None:
        """Note the time to an answer's first tokens."""
        self._first.labels(model).observe(seconds)

    def add(self, model: str, tokens: int, seconds: float | None) -> None:
        """Count an answer's new tokens, which came so long after those before them, if there were any."""
        self._new.labels(model).inc(tokens)
        if seconds is not None and tokens:
            self._each.labels(model).observe(seconds / tokens)

    def draft(self, model: str, drafted: int, accepted: int) -> None:
        """Count the drafts of an answer that ended."""
        self._drafted.labels(model).inc(drafted)
        self._accepted.labels(model).inc(accepted)

    def end(self, model: str, seconds: float, finishes: Sequence[str]) -> None:
        """Note a request's end, and why its answers ended."""
        self._whole.labels(model).observe(seconds)
        for finish in finishes:
            self._ended.labels(model, finish).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
