"""Real engines, random traffic: right adapters pass, and of wrong ones a request is named that shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime import __main__ as program
from dbo_runtime.errors import DeviceError
from dbo_runtime.testing import EquivalenceReport, check_equivalence
from tests.vllm_plugin.engines import TINY
from tests.vllm_plugin.families import make_family

ROOT = Path(__file__).parents[3]
OPTIONS = {"attention_backend": "CPU_ATTN", "block_size": 32}
Check = Callable[..., EquivalenceReport]


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_family("GraniteForCausalLM", tmp_path_factory.mktemp("granite")))


@pytest.fixture
def check_with(granite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return what checks a model whose adapter is one of `faulty_adapters`, by name."""
    package = tmp_path / "faulty-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 0\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    def check(adapter: str, requests: int = 48, **options: Any) -> EquivalenceReport:
        entry = f"GraniteForCausalLM = tests.vllm_plugin.equivalence.faulty_adapters:{adapter}"
        (package / "entry_points.txt").write_text(f"[dbo_runtime.adapters]\n{entry}\n")
        return check_equivalence(granite, requests=requests, **OPTIONS, **options)

    return check


@pytest.mark.vllm
@pytest.mark.slow
def test_300_requests_are_answered_alike() -> None:
    """100 with each number of micro-batches, on two ranks; the long run is `make soak`."""
    options = {"attention_backend": "CPU_MLA", "tensor_parallel_size": 2}
    report = check_equivalence(str(TINY), {}, 100, (2, 3, 4), seed=24, **options)
    assert report, str(report)
    for tally in report.tallies:
        assert tally.requests == 100
        assert tally.equal + tally.ties + tally.own == 100
        assert tally.counts.split > 50
        assert tally.counts.preempted > 0
        assert tally.aborted > 0
        assert 0 < tally.largest < 1e-4  # two ranks add up in another order


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "ranks", "micro_batches"), [("OtherPositions", 1, 2), ("OneTokenOff", 1, 3), ("DroppedReduce", 2, 2)]
)
def test_a_fault_is_a_bug_of_a_request_that_is_named(
    check_with: Check, adapter: str, ranks: int, micro_batches: int
) -> None:
    report = check_with(adapter, micro_batches=[micro_batches], tensor_parallel_size=ranks)
    assert not report
    (tally,) = report.tallies
    assert tally.own == 0
    bug = report.bugs[0]
    assert bug.request is not None
    assert bug.difference.kind in ("log-probability", "prompt log-probability")
    text = str(report)
    assert f"round {bug.round}, request {bug.number}, {micro_batches} micro-batches: {bug.difference.kind}" in text
    assert str(bug.request) in text
    assert f"--requests 48 --seed 0 --attention-backend CPU_ATTN --block-size 32 --tensor-parallel-size {ranks}" in text


@pytest.mark.vllm
@pytest.mark.slow
def test_the_same_adapter_without_a_fault_passes(check_with: Check) -> None:
    report = check_with("FaultyAdapter")
    assert report, str(report)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_named_round_alone_shows_it_again(check_with: Check) -> None:
    first = check_with("OtherPositions", requests=120, rounds=[1])
    again = check_with("OtherPositions", requests=120, rounds=[1])
    assert {bug.round for bug in first.bugs} == {1}
    assert [str(bug) for bug in again.bugs] == [str(bug) for bug in first.bugs]


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_fails_is_a_bug_with_its_error(check_with: Check) -> None:
    report = check_with("Crashing", micro_batches=[2, 3])
    assert not report
    (bug,) = report.bugs
    assert bug.difference.kind == "failure"
    assert "no_such_attribute" in bug.difference.detail
    assert "op L1.mlp" in str(report) or "L1.mlp" in str(report)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_says_what_was_compared(granite: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Without an adapter nothing is split, which is no proof of anything."""
    words = ["--requests", "8", "--attention-backend", "CPU_ATTN", "--block-size", "32", "--json"]
    assert program.main(["soak", granite, *words]) == 1
    facts = json.loads(capfd.readouterr().out)
    assert facts["failure"].startswith("no step was split into 2 micro-batches")
    (tally,) = facts["micro_batches"]
    assert (tally["requests"], tally["equal"], tally["split"]) == (8, 8, 0)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_does_not_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DeviceError, match="vLLM fails"):
        check_equivalence(str(tmp_path), requests=8)
