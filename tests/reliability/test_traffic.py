"""Cases of `make soak`, each with a few requests: those that public reports were about, and drafts.

They are in shards of CI.
"""

from __future__ import annotations

import pytest

from tests.reliability.traffic import CASES, run_case

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def check(title: str, requests: int = 48) -> None:
    """Answer the requests of a case split in two and unsplit, and compare."""
    (number,) = (number for number, case in enumerate(CASES) if case.title == title)
    report = run_case(number, requests, 0, (2,))
    assert report, str(report)
    (tally,) = report.tallies
    assert tally.equal + tally.ties + tally.own == requests
    assert tally.counts.split > 5
    assert tally.counts.calibrated == CASES[number].calibrates * len(range(0, requests, 48))


def test_embeddings() -> None:
    check("Qwen3, one rank, embeddings")


def test_bidirectional_attention() -> None:
    check("Qwen3, one rank, bidirectional embeddings")


def test_linear_attention_where_each_step_is_checked() -> None:
    check("Qwen3.5, one rank")


def test_linear_attention_where_first_steps_are_compared() -> None:
    check("Qwen3.5-MoE, one rank")


def test_linear_attention_where_costs_are_measured_while_prefixes_are_cached() -> None:
    check("Qwen3.5, one rank, prefix caching")


def test_linear_attention_on_data_parallel_ranks() -> None:
    check("Qwen3.5-MoE, DP=2 with experts", 64)


def test_cached_prefixes_of_linear_attention_on_data_parallel_ranks() -> None:
    check("Qwen3.5-MoE, DP=2 with experts, prefix caching", 64)


def test_a_layerwise_connector_on_data_parallel_ranks() -> None:
    check("DeepSeek V3, DP=2 with experts, layerwise KV connector", 64)


def test_races_on_data_parallel_ranks() -> None:
    check("Qwen3-MoE, DP=2 with experts, DBO_CHECK=races", 32)


def test_costs_that_are_measured_between_requests() -> None:
    check("Llama, one rank, costs measured between requests")


def test_drafts_of_n_grams() -> None:
    check("Llama, one rank, n-gram drafts")
