"""What planning costs inside a step, and what it decides: replays of traffic over costs of models of 61 layers.

    python -m pytest tests/benchmarks/bench_planning.py -o python_files='bench_*.py' -q -s [--write-page]

Each row replays the batches of a server: continuous batching that is simulated, or what vLLM scheduled for random
traffic (`record_mix.py`). No batch comes twice. Times are CPU times of the planning thread, which waits for nothing,
because other processes share the machine. A sample of the steps is compared with a full search for each, and predicted
times with a simulation. `DBO_BENCH_STEPS` is the number of steps of a simulated replay (1000).
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Instruction
from dbo_runtime.lab.oracle.searching_planner import SearchingPlanner
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.ways import mark_token_wise
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.named_order import compute_end
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.planner.online.simulation import predict_timeline
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.benchmarks.bench_core import LAYERS, record_decoder
from tests.benchmarks.bench_planner import make_table as make_decoder_table
from tests.benchmarks.continuous_batching import schedule
from tests.support.page import Publish, find_command, make_table

STEPS = int(os.environ.get("DBO_BENCH_STEPS", "1000"))
COMPARED_STEPS = 100
DISTINCT_BATCHES = 100_000
CONFIG = RuntimeConfig(probation=False)  # decisions of a search have none
LIMITS = ServingLimits()
MIX = Path(__file__).with_name("recorded_mix.json")
MIX_LIMITS = ServingLimits(tokens=4096, requests=64, context=4096)

MAX_SECONDS = {0.5: 50e-6, 0.99: 1e-3, 1.0: 5e-3}  # quantile -> inside a step
MAX_START_SECONDS = 2.0
MIN_ALIKE = 0.98
MIN_REMEMBERED = 0.95
MAX_ERROR = 0.005
MAX_GROWTH_MIB = 8.0
COST_HEADER = ("replay", "steps (split, nano)", "start s", "p50 us", "p99 us", "max us")
DECISION_HEADER = ("replay", "remembered", "alike", "error", "longer")


class Row(NamedTuple):
    """A replay: of which traffic over which costs.

    Attributes:
        load: tokens that arrive by those that could be computed; None replays the recorded mix.
    """

    name: str
    load: float | None
    make: Callable[[], tuple[Program, CostTable]]
    limits: ServingLimits = LIMITS


class Replay(NamedTuple):
    """What a replay measured; see the table."""

    row: str
    start_seconds: float
    steps: int
    split: int
    nano: int
    seconds: Sequence[float]
    remembered: float
    alike: float
    error: float
    longer: float

    @property
    def costs(self) -> list[str]:
        """The cells of what planning takes."""
        p50, p99 = np.quantile(self.seconds, [0.5, 0.99]) * 1e6
        return [
            self.row,
            f"{self.steps} ({self.split}, {self.nano})",
            f"{self.start_seconds:.1f}",
            f"{p50:.0f}",
            f"{p99:.0f}",
            f"{max(self.seconds) * 1e6:.0f}",
        ]

    @property
    def decisions(self) -> list[str]:
        """The cells of how good its decisions are."""
        return [
            self.row,
            f"{self.remembered:.0%}",
            f"{self.alike:.0%}",
            f"{self.error:.2%}",
            f"{self.longer:.2%}",
        ]

    def list_missed(self) -> list[str]:
        """Return the targets that the row misses."""
        checks = {
            **{
                f"quantile {quantile:g}": float(np.quantile(self.seconds, quantile)) <= most
                for quantile, most in MAX_SECONDS.items()
            },
            "start": self.start_seconds <= MAX_START_SECONDS,
            "remembered": self.remembered >= MIN_REMEMBERED,
            "alike": self.alike >= MIN_ALIKE,
            "error": self.error <= MAX_ERROR,
        }
        return [f"{self.row}: {name}" for name, is_met in checks.items() if not is_met]


class CountingPlanner(Planner):
    """Counts the decisions that were not remembered."""

    evaluated = 0

    def _evaluate(self, *arguments: object) -> SplitChoice | Decline:
        self.evaluated += 1
        return super()._evaluate(*arguments)  # type: ignore[arg-type]  # handed on as they are


def _read_case(name: str, token_wise: bool = False) -> Callable[[], tuple[Program, CostTable]]:
    """Return what makes a published case; *token_wise* ops, as adapters declare them, may be cut into nano-batches."""

    def make() -> tuple[Program, CostTable]:
        table = get_case(name).table
        program = build_program(table.program)
        return mark_token_wise(program) if token_wise else program, table

    return make


def _make_decoder() -> tuple[Program, CostTable]:
    program = record_decoder(LAYERS)
    return program, make_decoder_table(program)


ROWS = [
    Row("r1-tp16-941, mostly decodes", 0.3, _read_case("r1-tp16-941")),
    Row("61 layers of 9 ops, loaded", 1.2, _make_decoder),
    Row("a3-layer-4894, loaded", 1.2, _read_case("a3-layer-4894")),
    Row("r1-decode-910c, with `side`", 0.8, _read_case("r1-decode-910c")),
    Row("a3-layer-4894, recorded mix", None, _read_case("a3-layer-4894"), MIX_LIMITS),
    Row("r1-tp16-941, also nano-batches", 0.3, _read_case("r1-tp16-941", token_wise=True)),
    Row("a3-layer-4894, also nano-batches", 1.2, _read_case("a3-layer-4894", token_wise=True)),
]


def test_a_step_waits_microseconds_for_its_plan(publish: Publish) -> None:
    replays = [_replay(row) for row in ROWS]
    missed = [text for replay in replays for text in replay.list_missed()]
    grown = _measure_growth()
    if grown > MAX_GROWTH_MIB:
        missed.append(f"memory: {grown:.0f} MiB")
    publish(
        "planning",
        find_command(__file__),
        [
            *make_table(COST_HEADER, [replay.costs for replay in replays]),
            "",
            *make_table(DECISION_HEADER, [replay.decisions for replay in replays]),
            "",
            f"- Memory grew by {grown:.1f} MiB in {DISTINCT_BATCHES:,} distinct batches (target {MAX_GROWTH_MIB:.0f}).",
            f"- Missed: {'; '.join(missed) if missed else 'no target'}.",
        ],
    )
    assert not missed, missed


def _replay(row: Row) -> Replay:
    program, table = row.make()
    start = time.process_time()
    planner = CountingPlanner(program, table, row.limits)
    planner.prepare(CONFIG)
    started = time.process_time() - start
    seconds: list[float] = []
    decisions: list[tuple[Batch, SplitChoice | Decline]] = []
    evaluated = []
    for batch in _list_batches(row, planner):
        before = time.thread_time()
        decision = planner.decline_early(batch.tokens) or planner.choose(batch, CONFIG)
        seconds.append(time.thread_time() - before)
        decisions.append((batch, decision))
        evaluated.append(planner.evaluated)
    half = len(evaluated) // 2
    alike, errors, longer = _compare(planner, decisions[:: max(len(decisions) // COMPARED_STEPS, 1)])
    return Replay(
        row=row.name,
        start_seconds=started,
        steps=len(decisions),
        split=sum(isinstance(decision, SplitChoice) for _, decision in decisions),
        nano=sum(_is_nano(decision) for _, decision in decisions),
        seconds=seconds,
        remembered=1.0 - (evaluated[-1] - evaluated[half]) / (len(evaluated) - half),
        alike=alike,
        error=mean(errors or [0.0]),
        longer=mean(longer or [0.0]),
    )


def _compare(
    planner: Planner, decisions: Iterable[tuple[Batch, SplitChoice | Decline]]
) -> tuple[float, list[float], list[float]]:
    """Return the share of decisions alike, relative errors of predictions, and by how much steps take longer.

    The search is for micro-batches, so steps in nano-batches are compared with a simulation only.
    """
    alike, errors, longer = [], [], []
    reference = SearchingPlanner(planner.program, planner.table)
    for batch, decision in decisions:
        if isinstance(decision, SplitChoice) and _is_nano(decision):
            errors.append(abs(decision.prediction.split / _simulate_nano(planner, batch, decision) - 1.0))
            continue
        searched = planner.decline_early(batch.tokens) or reference.choose(batch, CONFIG)
        alike.append(_splits(decision) == _splits(searched))
        if isinstance(decision, SplitChoice):
            seconds = _simulate(planner, batch, decision)
            errors.append(abs(decision.prediction.split / seconds - 1.0))
            if isinstance(searched, SplitChoice):
                longer.append(seconds / _simulate(planner, batch, searched) - 1.0)
    return mean(alike or [1.0]), errors, longer


def _splits(decision: SplitChoice | Decline) -> bool:
    """Return whether a step is split; in doubt, which is for probation, it is not."""
    return isinstance(decision, SplitChoice) and decision.doubt is None


def _simulate(planner: Planner, batch: Batch, choice: SplitChoice) -> float:
    timeline = Predictor(planner.program, planner.table).simulate(choice.order.schedule, choice.cut.features)
    return planner.table.host.time_split(compute_end(timeline), batch.tokens)


def _is_nano(decision: SplitChoice | Decline) -> bool:
    return isinstance(decision, SplitChoice) and decision.cut.nano_batches > 0


def _simulate_nano(planner: Planner, batch: Batch, choice: SplitChoice) -> float:
    """Simulate a step in nano-batches: joint ops take all its tokens, the others those of their nano-batch."""
    table, (whole, *parts) = planner.table, choice.cut.features

    def measure(instruction: Instruction) -> BatchFeatures:
        number = instruction.op.nano_batch
        return whole if number is None else parts[number]

    def get_credit(instruction: Instruction) -> float:
        cost = table.ops[instruction.op.name]
        return getattr(cost, "credit", lambda _: 0.0)(measure(instruction))

    def get_time(instruction: Instruction) -> float:
        return table.ops[instruction.op.name].time(measure(instruction))

    timeline = predict_timeline(choice.order.schedule, get_time, table.contention, table.host, get_credit)
    return table.host.time_split(compute_end(timeline), batch.tokens)


def _list_batches(row: Row, planner: Planner) -> Iterator[Batch]:
    if row.load is None:
        for step in json.loads(MIX.read_text(encoding="utf-8")):
            lengths = tuple(step["query_lens"])
            prefills = sum(length for length in lengths if length > 1)
            yield Batch(lengths, prefills, context_lens=tuple(step["context_lens"]))
        return

    def measure(batch: Batch) -> float:
        return planner.predict_unsplit(measure_features(batch.query_lens, batch.context_lens))

    capacity = row.limits.tokens / planner.predict_unsplit(BatchFeatures(row.limits.tokens))
    yield from islice(schedule(random.Random(0), row.limits, row.load, measure, capacity), STEPS)


def _measure_growth() -> float:
    """Return by how many MiB this process grows while it plans distinct batches, after a tenth of them."""
    program, table = ROWS[2].make()
    planner = Planner(program, table)
    planner.prepare(CONFIG)
    rng, before = random.Random(1), 0
    for number in range(DISTINCT_BATCHES):
        prompt, context = rng.randint(2, 4096), rng.randint(0, 16_384)
        decodes = rng.randint(0, 64)
        batch = Batch((*[1] * decodes, prompt), prompt, context_lens=(*[rng.randint(1, 8192)] * decodes, context))
        planner.choose(batch, CONFIG)
        if number == DISTINCT_BATCHES // 10:
            gc.collect()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
