"""Reads Prometheus text, for vLLM's own counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvshuttle.localstack import local_http

# Names on vLLM 0.32. Tokens, not requests.
PROMPT_TOKENS = "vllm:prompt_tokens_total"
LOCAL_HITS = "vllm:prefix_cache_hits_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries_total"
RUNNING = "vllm:num_requests_running"
PREEMPTIONS = "vllm:num_preemptions_total"
WAITING = "vllm:num_requests_waiting"


@dataclass(frozen=True)
class Metrics:
    """One scrape: value by name and labels."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of `name` that carry these labels; 0.0 if there are none."""
        wanted = set(labels.items())
        return sum(
            value
            for (sample, its_labels), value in self.samples.items()
            if sample == name and wanted <= its_labels
        )

    def names(self) -> set[str]:
        """Every sample name in the scrape."""
        return {name for name, _ in self.samples}


def parse(text: str) -> Metrics:
    """Parses the text exposition format."""
    return Metrics(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def scrape(url: str, timeout_s: float = 10.0) -> Metrics:
    """Reads `url`/metrics."""
    response = local_http.get(f"{url}/metrics", timeout=timeout_s)
    response.raise_for_status()
    return parse(response.text)
