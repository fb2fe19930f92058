"""What planning costs inside a step, and what it decides: replays of continuous batching over costs of 61-layer models.

    python -m pytest tests/benchmarks/bench_planning.py -o python_files='bench_*.py' -q -s

`DBO_BENCH_STEPS` is the number of steps of each replay (1000). Times are CPU times of the planning thread: it waits for
nothing, and other processes share the machine. Decisions are compared with those of a full search for a sample of the
steps, and predicted times with a simulation.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import mean
from typing import NamedTuple

import numpy as np
import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.planner import Planner, SplitChoice
from dbo_runtime.planner.online.prepared_planner import PreparedPlanner
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.planner.whatif.published_cases import get_case
from dbo_runtime.program import Program
from tests.benchmarks.bench_core import LAYERS, record_decoder
from tests.benchmarks.bench_planner import make_table
from tests.benchmarks.continuous_batching import schedule

STEPS = int(os.environ.get("DBO_BENCH_STEPS", "1000"))
COMPARED_STEPS = 40
DISTINCT_BATCHES = 100_000
CONFIG = RuntimeConfig()
LIMITS = ServingLimits()


class Row(NamedTuple):
    """A replay: of which costs, under which load."""

    name: str
    load: float
    make: Callable[[], tuple[Program, CostTable]]


def _read_case(name: str) -> Callable[[], tuple[Program, CostTable]]:
    def make() -> tuple[Program, CostTable]:
        table = get_case(name).table
        return build_program(table.program), table

    return make


def _make_decoder() -> tuple[Program, CostTable]:
    program = record_decoder(LAYERS)
    return program, make_table(program)


ROWS = [
    Row("r1-tp16-941", 0.3, _read_case("r1-tp16-941")),
    Row("61 layers x 9 ops", 1.2, _make_decoder),
    Row("a3-layer-4894", 1.2, _read_case("a3-layer-4894")),
    Row("r1-decode-910c", 0.8, _read_case("r1-decode-910c")),
]


def _replay(row: Row, table: CostTable, planner: PreparedPlanner, steps: int) -> Iterator[Batch]:
    def measure(batch: Batch) -> float:
        return planner.predict_unsplit(measure_features(batch.query_lens, batch.context_lens))

    capacity = LIMITS.tokens / planner.predict_unsplit(BatchFeatures(LIMITS.tokens))
    return islice(schedule(random.Random(0), LIMITS, row.load, measure, capacity), steps)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_step_waits_microseconds_for_its_plan(row: Row) -> None:
    program, table = row.make()
    start = time.process_time()
    planner = PreparedPlanner(program, table, LIMITS)
    planner.prepare(CONFIG)
    started = time.process_time() - start
    seconds, decisions = [], []
    for batch in _replay(row, table, planner, STEPS):
        if planner.decline_early(batch.tokens) is not None:
            continue
        before = time.thread_time()
        decision = planner.choose(batch, CONFIG)
        seconds.append(time.thread_time() - before)
        decisions.append((batch, decision))
    p50, p90, p99 = np.quantile(seconds, [0.5, 0.9, 0.99]) * 1e6
    split = [decision for _, decision in decisions if isinstance(decision, SplitChoice)]
    print(
        f"\n{row.name}: prepared in {started:.2f} s, {len(decisions)} steps ({len(split)} split): "
        f"p50 {p50:.0f} us, p90 {p90:.0f}, p99 {p99:.0f}, max {max(seconds) * 1e6:.0f}; "
        f"{len(planner._remembered)} kinds"
    )
    reference = Planner(program, table)
    sample = decisions[:: max(len(decisions) // COMPARED_STEPS, 1)]
    alike, longer, errors = 0, [], []
    for batch, decision in sample:
        searched = reference.choose(batch, CONFIG)
        alike += isinstance(decision, SplitChoice) == isinstance(searched, SplitChoice)
        if isinstance(decision, SplitChoice):
            errors.append(abs(decision.prediction.split / _simulate(reference, batch, decision) - 1.0))
            if isinstance(searched, SplitChoice):
                longer.append(_simulate(reference, batch, decision) / _simulate(reference, batch, searched) - 1.0)
    print(
        f"  of {len(sample)}: decided alike {alike / len(sample):.1%}; predicted off by {mean(errors or [0]):.2%} "
        f"(max {max(errors, default=0):.2%}); longer than searched {mean(longer or [0]):.2%} (max {max(longer, default=0):.2%})"
    )


def _simulate(planner: Planner, batch: Batch, choice: SplitChoice) -> float:
    timeline = planner.draw_timeline(choice.order.schedule, measure_slices(batch, choice.slices))
    host = planner.table.host
    return max(span.end for span in timeline.spans) + host.split + host.split_per_token * batch.tokens
