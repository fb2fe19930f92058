"""Counts of steps, from the workers that count to the process that is asked, through the real prometheus_client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import dbo_runtime
from dbo_runtime.decline import Decline
from dbo_runtime.observe.counts import FOLDER, SHARED, get_folder
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.vllm_plugin.telemetry.metrics import HISTOGRAMS, Metrics
from tests.support.vllm.metrics import make_plan, scrape

NOTHING = {
    "split": 0,
    "unsplit": 0,
    "nano": 0,
    "concurrent": 0,
    "encoder_forwards": {"split": 0, "unsplit": 0},
    "micro_batches": 0,
    "tokens": 0,
    "declined": {},
    "standing_declines": {},
    "disagreements": {"unsplit": 0, "error": 0},
    "planning_seconds": 0.0,
    "predicted_seconds": {},
    "measured_seconds": {},
    "sampled": 0,
    "communication_seconds": 0.0,
    "hidden_seconds": 0.0,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_steps_are_counted_by_mode_and_reason(folder: Path) -> None:
    metrics = Metrics(folder, "tiny", 0)
    metrics.count_step(make_plan(100, 28))
    metrics.count_step(make_plan(4, 4, 20000))
    metrics.count_step(Decline("padded batch", "7 tokens"))
    metrics.count_step(Decline("padded batch", "8 tokens"))
    unsplit = make_plan(32, 32)
    metrics.count_step(replace(unsplit, slices=unsplit.slices[:1]))
    metrics.count_step(replace(unsplit, slices=unsplit.slices[:1], nano_batches=unsplit.slices))
    found = scrape(folder)
    steps = found["vllm:dbo_steps_total"]
    by_mode = {"split": 2, "unsplit": 2, "concurrent": 1, "nano": 1}
    assert steps == {("tiny", "0", mode): count for mode, count in by_mode.items()}
    assert list(found["vllm:dbo_declines_total"].values()) == [2]
    assert list(found["vllm:dbo_micro_batches_total"].values()) == [5]
    buckets = {float(labels[-1]): value for labels, value in found["vllm:dbo_micro_batch_tokens_bucket"].items()}
    assert (buckets[1], buckets[8], buckets[32], buckets[128], buckets[16384], buckets[float("inf")]) == (
        0,
        2,
        3,
        4,
        4,
        5,
    )
    assert list(found["vllm:dbo_micro_batch_tokens_sum"].values()) == [20136]
    assert list(found["vllm:dbo_micro_batch_tokens_count"].values()) == [5]


def test_a_planning_time_counts_in_the_buckets_whose_bounds_it_does_not_exceed(folder: Path) -> None:
    metrics = Metrics(folder, "tiny", 0)
    times = (0.0, 4e-5, 5e-5, 0.003, 0.75, 3.0)
    for seconds in times:
        metrics.count_planning(seconds)
    found = scrape(folder)
    buckets = {float(labels[-1]): value for labels, value in found["vllm:dbo_planning_seconds_bucket"].items()}
    assert {1e-5, 1e-3, 1.0, float("inf")} < set(buckets)
    assert buckets == {bound: sum(seconds <= bound for seconds in times) for bound in buckets}
    assert list(found["vllm:dbo_planning_seconds_count"].values()) == [len(times)]
    assert list(found["vllm:dbo_planning_seconds_sum"].values()) == [pytest.approx(sum(times))]


def test_python_reads_the_same_summed_over_engines(folder: Path) -> None:
    for engine in range(2):
        metrics = Metrics(folder, "tiny", engine)
        metrics.count_step(make_plan(100, 28))
        metrics.count_step(Decline("nowhere to cut"))
        metrics.count_planning(0.125)
        metrics.count_time("split", 0.5, 0.75)
        metrics.count_encoder(make_plan(16, 16))
        metrics.count_standing(Decline("DBO_MODE is off"))
        metrics.count_disagreement("error")
        metrics.show_costs(True)
        spans = (Span("compute", "a", 0, 0.0, 3.0), Span("comm", "b", 1, 2.0, 6.0), Span("aux", "c", 0, 2.5, 3.5))
        metrics.add_sample(Timeline(spans))
    assert dbo_runtime.statistics() == {
        "split": 2,
        "unsplit": 2,
        "nano": 0,
        "concurrent": 0,
        "encoder_forwards": {"split": 2, "unsplit": 0},
        "micro_batches": 4,
        "tokens": 256,
        "declined": {"nowhere to cut": 2},
        "standing_declines": {"DBO_MODE is off": 2},
        "disagreements": {"unsplit": 0, "error": 2},
        "planning_seconds": 0.25,
        "predicted_seconds": {"split": 1.0},
        "measured_seconds": {"split": 1.5},
        "sampled": 2,
        "communication_seconds": 10.0,
        "hidden_seconds": 3.0,
    }
    assert len(scrape(folder)["vllm:dbo_steps_total"]) == 8  # two engines, four modes


@pytest.mark.parametrize(("asks", "asked"), [(True, "yes"), (False, "no")])
def test_whether_costs_are_known_is_shown_from_the_start_and_replaced(folder: Path, asks: bool, asked: str) -> None:
    metrics = Metrics(folder, "tiny", 0, asks_costs=asks)
    assert scrape(folder)["vllm:dbo_costs_known"] == {("tiny", "0", asked): 0}
    metrics.show_costs(True)
    assert scrape(folder)["vllm:dbo_costs_known"] == {("tiny", "0", asked): 1}


def test_of_two_engines_of_one_process_the_costs_of_the_later_are_shown(folder: Path) -> None:
    Metrics(folder, "tiny", 0).show_costs(True)
    Metrics(folder, "tiny", 0)
    assert scrape(folder)["vllm:dbo_costs_known"] == {("tiny", "0", "no"): 0}


def test_disagreements_are_counted_from_zero_so_that_the_first_is_an_increase(folder: Path) -> None:
    metrics = Metrics(folder, "tiny", 0)
    assert scrape(folder)["vllm:dbo_disagreements_total"] == {("tiny", "0", "error"): 0, ("tiny", "0", "unsplit"): 0}
    metrics.count_disagreement("unsplit")
    assert scrape(folder)["vllm:dbo_disagreements_total"] == {("tiny", "0", "error"): 0, ("tiny", "0", "unsplit"): 1}


def test_without_counts_everything_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.delenv(FOLDER, raising=False)
    assert dbo_runtime.statistics() == NOTHING


def test_an_engine_that_has_run_nothing_yet_shows_zeros(folder: Path) -> None:
    Metrics(folder, "tiny", 0)
    assert dbo_runtime.statistics() == NOTHING
    found = scrape(folder)
    assert set(found["vllm:dbo_steps_total"].values()) == {0}
    assert set(found["vllm:dbo_micro_batch_tokens_bucket"].values()) == {0}
    assert set(found["vllm:dbo_planning_seconds_bucket"].values()) == {0}
    for name in HISTOGRAMS:  # without one of these `LLM.get_metrics()` fails
        assert [list(found[f"vllm:dbo_{name}_{part}"].values()) for part in ("sum", "count")] == [[0], [0]]


def test_with_several_api_servers_counts_lie_where_vllm_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED, str(tmp_path))
    monkeypatch.setenv(FOLDER, "/nowhere")
    Metrics(tmp_path, "tiny", 0).count_step(make_plan(100, 28))
    assert dbo_runtime.statistics()["split"] == 1


def count_in_worker() -> None:
    """Count a step as a worker does, in the folder of the process that started this one."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    Metrics(str(get_folder()), "tiny", 0).count_step(make_plan(100, 28))


# An engine's process, the worker that it has multiprocessing start, and another program that it starts.
ENGINE = """
import json, multiprocessing, os, subprocess, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import dbo_runtime
from dbo_runtime.observe.counts import get_folder
from tests.vllm_plugin.telemetry.test_metrics import count_in_worker

folder = get_folder()
worker = multiprocessing.get_context("spawn").Process(target=count_in_worker)
worker.start()
worker.join()
load_general_plugins()
program = subprocess.run([sys.executable, "-c", sys.argv[1]], check=True, capture_output=True, text=True)
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.reader import get_metrics_snapshot
snapshot = {metric.name: metric.value for metric in get_metrics_snapshot() if metric.name == "vllm:dbo_micro_batches"}
shown = "vllm:dbo_steps_total" in generate_latest(REGISTRY).decode()
print(json.dumps([folder, get_folder(), program.stdout.split(), dbo_runtime.statistics(), snapshot, shown]))
"""
PROGRAM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from dbo_runtime.observe.counts import get_folder
print(get_folder())
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_what_a_worker_counts_its_engine_serves_and_removes_at_its_end() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "DBO_", "_DBO_"))}
    env.update(VLLM_ASCEND_ENABLE_DBO="1", VLLM_LOGGING_LEVEL="ERROR", PYTHONPATH=str(Path(__file__).parents[3]))
    done = subprocess.run([sys.executable, "-c", ENGINE, PROGRAM], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    folder, later, others, found, snapshot, shown = json.loads(done.stdout.splitlines()[-1])
    assert folder == later
    assert (found["split"], found["micro_batches"], found["tokens"]) == (1, 2, 128)
    assert snapshot == {"vllm:dbo_micro_batches": 2}
    assert shown
    assert not Path(folder).exists()
    (other,) = others  # counts of another server do not mix with ours, although it inherits our environment
    assert other != folder
