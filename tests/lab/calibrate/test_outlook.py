"""What `dbo calibrate` says about new costs: whether steps will be split by them, and if not, why and what helps."""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.lab.calibrate.outlook import find_outlook
from dbo_runtime.lab.calibrate.report import Report
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.scale import parse_bandwidth, scale_bandwidth, set_layers
from dbo_runtime.planner.costs.cost_table import CostTable

TABLE = set_layers(get_case("a3-layer-4894").table, (4,))


def connect(table: CostTable, transport: str) -> CostTable:
    return replace(table, provenance=replace(table.provenance, machine={"transport": transport}))


def test_the_smallest_split_and_the_largest_gain_are_told() -> None:
    splits, text = find_outlook(connect(TABLE, "network"), 8192, "costs.json")
    said, more = text.splitlines()
    assert splits
    assert said.startswith("With these costs prefills from ")
    assert " tokens will be split; the largest predicted gain is that of 8192 tokens: " in said
    assert more == "More: dbo plan --costs costs.json --sweep tokens"


def test_shared_memory_of_one_host_is_a_reason_with_a_remedy() -> None:
    splits, text = find_outlook(connect(TABLE, "shared memory"), 8192, "costs.json")
    said, remedy = text.splitlines()
    assert not splits
    assert said.startswith(
        "With these costs nothing will be split: no communication to hide (all ranks are on one host"
    )
    assert "over several hosts" in remedy


def test_a_network_that_is_too_fast_is_a_reason_with_a_remedy() -> None:
    fast = connect(scale_bandwidth(TABLE, parse_bandwidth("1000x")), "network")
    splits, text = find_outlook(fast, 1024, "costs.json")
    said, remedy, _ = text.splitlines()
    assert not splits
    assert said.startswith("With these costs no prefill up to 1024 tokens will be split: no gain predicted (")
    assert "DBO_MODE=always" in remedy


def test_data_parallel_ranks_are_asked_together() -> None:
    table = connect(TABLE, "network")
    parallel = replace(table, provenance=replace(table.provenance, parallel={"data": 2}))
    assert find_outlook(parallel, 8192, "costs.json").text.startswith("With these costs prefills from ")


def test_a_report_says_in_words_how_good_the_fit_is() -> None:
    good = Report(6.6, "0123", {"attention": 0.031}, {"unsplit": 0.01, "split": 0.02}, 0.05, {"compute": 1.25}, 8192, 0)
    assert "half of the measured steps are within 2.0% of what the costs predict; median errors" in str(good)
    poor = replace(good, step_errors={"unsplit": 0.119, "split": 0.073})
    assert "within 11.9% of what the costs predict: too much to trust small gains; calibrate with" in str(poor)
