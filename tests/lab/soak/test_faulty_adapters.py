"""Faults planted into an adapter: random traffic on real engines finds each, and names a request that shows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.testing import EquivalenceReport, check_equivalence
from tests.support.vllm.families import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

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
        entry = f"GraniteForCausalLM = tests.support.lab.faulty_adapters:{adapter}"
        (package / "entry_points.txt").write_text(f"[dbo_runtime.adapters]\n{entry}\n")
        return check_equivalence(granite, requests=requests, **OPTIONS, **options)

    return check


@pytest.mark.parametrize(
    ("adapter", "split", "ranks", "micro_batches"),
    [
        ("OtherPositions", "micro", 1, 2),
        ("OneTokenOff", "micro", 1, 3),
        ("OneTokenOff", "nano", 1, 3),
        ("DroppedReduce", "micro", 2, 2),
    ],
)
def test_a_fault_is_a_bug_of_a_request_that_is_named(
    check_with: Check, adapter: str, split: str, ranks: int, micro_batches: int
) -> None:
    settings = {"DBO_SPLIT": split}
    report = check_with(adapter, settings=settings, micro_batches=[micro_batches], tensor_parallel_size=ranks)
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


def test_the_same_adapter_without_a_fault_passes(check_with: Check) -> None:
    report = check_with("FaultyAdapter")
    assert report, str(report)


def test_the_named_round_alone_shows_it_again(check_with: Check) -> None:
    first = check_with("OtherPositions", requests=120, rounds=[1])
    again = check_with("OtherPositions", requests=120, rounds=[1])
    assert {bug.round for bug in first.bugs} == {1}
    found, repeated = ({bug.number for bug in report.bugs} for report in (first, again))
    assert found & repeated  # of those that meet a structured request, which waits for its grammar, not all


@pytest.mark.parametrize(("adapter", "is_served"), [("Crashing", False), ("CrashingLater", True)])
def test_a_step_that_fails_is_a_bug_with_its_error(check_with: Check, adapter: str, is_served: bool) -> None:
    report = check_with(adapter, micro_batches=[2, 3])
    assert not report
    (bug,) = report.bugs
    assert bug.difference.kind == "failure"
    assert ("its first split step fails" in bug.difference.detail) != is_served
    assert "no_such_attribute" in bug.difference.detail
    assert "op 'mlp', layer 1" in str(report)
