"""What splitting gains and loses where costs are off and lanes slow each other by what the planner does not know.

    python -m pytest tests/benchmarks/bench_never_lose.py -o python_files='bench_*.py' -q -s

Simulated. A machine is a published case with other costs: each op's are off by a lognormal factor, and its
lanes `compute` and `comm` slow each other by a factor drawn evenly from one to the row's. The planner has the published
costs and knows none of these factors. A machine serves four steps (prompts, prompts with decodes, decodes; sizes even
in their logarithm) again and again in random order; what is measured of a step has noise of 3 %, and one in fifty takes
up to three times as long. `auto` learns as it does when serving: times are exchanged every 64 steps, factors corrected,
steps on probation. A row has all machines; the gain of a step is over all times that it was served, trials included.

`DBO_BENCH_MACHINES` is the number of machines of each case (12), and `DBO_BENCH_FIRST` the number of the first (0), by
which it is drawn.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from statistics import mean
from typing import NamedTuple

from dbo_runtime.batch import Batch, place_cuts, share_evenly, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.whatif.published_cases import PublishedCase, list_cases
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import OpCost
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.cuts import measure_cut, measure_slices
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.page import Publish, find_command, make_table

MACHINES = int(os.environ.get("DBO_BENCH_MACHINES", "12"))
FIRST = int(os.environ.get("DBO_BENCH_FIRST", "0"))
STEPS = 4  # that a machine serves
SERVED = 4096  # steps that a machine serves, each of the four about 1024 times
NOISE = 0.03
OUTLIERS = 0.02
OMITTED = "910b-profile-4894"  # has 152 layers
AUTO = RuntimeConfig(side="off")
GATED = replace(AUTO, probation=False)
ALWAYS = replace(AUTO, mode="always")
CONTEXTS = (0, 0, 512, 2048, 8192)


class Row(NamedTuple):
    """How far the truth is from what the planner knows, and what is asked of `auto`."""

    name: str
    sigma: float
    contention: float
    max_loss: float


ROWS = (
    Row("costs off by sigma 0.2", 0.2, 1.0, 0.01),
    Row("costs off by sigma 0.5", 0.5, 1.0, 0.01),
    Row("sigma 0.2, contention up to 1.3", 0.2, 1.3, 0.01),
    Row("sigma 0.2, contention up to 1.6", 0.2, 1.6, 0.03),
)
MAX_BEHIND_HINDSIGHT = 0.01
BEFORE, DOUBT, AFTER, HINDSIGHT = "`auto` before", "with doubt only", "`auto`", "hindsight"
ALWAYS_SPLIT, VLLM, ASCEND = "always", "vLLM 512/32", "256/64"
POLICIES = (AFTER, ALWAYS_SPLIT, VLLM, ASCEND, HINDSIGHT)
STAGES = (BEFORE, DOUBT, AFTER)


class Truth:
    """What steps take on one machine, in seconds."""

    def __init__(self, case: PublishedCase, row: Row, number: int) -> None:
        rng = random.Random(f"{case.name} {row.name} {number}")
        slower = {lane: rng.uniform(1.0, row.contention) for lane in (COMPUTE, COMM)}
        known = case.table.contention
        contention = {**known, **{lane: known.get(lane, 1.0) * factor for lane, factor in slower.items()}}
        ops = {name: disturb(cost, math.exp(rng.gauss(0.0, row.sigma))) for name, cost in case.table.ops.items()}
        self._table = replace(case.table, ops=ops, contention=contention)
        self._predictor = Predictor(build_program(case.table.program), self._table)
        self._split: dict[tuple[Batch, SplitChoice], float] = {}

    def time_unsplit(self, batch: Batch) -> float:
        (features,) = measure_slices(batch, slice_batch(batch, ()))
        return self._predictor.predict_unsplit(features)

    def time_split(self, batch: Batch, choice: SplitChoice) -> float:
        """Return the seconds with the very features of the micro-batches, and not with those of their buckets."""
        host = self._table.host
        ops = self._predictor.simulate_end(choice.order, measure_slices(batch, choice.slices))
        return ops + host.split + host.split_per_token * batch.tokens


def disturb(cost: OpCost, factor: float) -> OpCost:
    """Return a cost all times of which are *factor* times as long."""
    return replace(
        cost, **{item.name: getattr(cost, item.name) * factor for item in fields(cost) if item.metadata.get("is_time")}
    )


class Case:
    """A published case: its planners as prepared, before and with doubt, and what they choose from.

    They serve on one machine after another, and forget in between what they learnt.
    """

    def __init__(self, case: PublishedCase) -> None:
        self.case = case
        self.program = build_program(case.table.program)
        undoubted = {COMPUTE: 1.0, COMM: 1.0, **case.table.contention}
        self.before = prepare(self.program, replace(case.table, contention=undoubted))
        self.after = prepare(self.program, case.table)
        self._always = {
            count: prepare(self.program, case.table, replace(ALWAYS, micro_batches=count))
            for count in self.after.list_counts(ALWAYS)
        }
        self._ping_pong = Candidates(self.program.fold_side(), 1).make_policy("alternate", 0, 2)
        self._options: dict[Batch, tuple[SplitChoice, ...]] = {}

    def choose_best(self, batch: Batch) -> SplitChoice:
        """Return the split that is predicted to be fastest."""
        return self.list_options(batch)[0]

    def list_options(self, batch: Batch) -> tuple[SplitChoice, ...]:
        """Return the best splits into each number of micro-batches, the fastest first, as predicted."""
        if batch not in self._options:
            options = [
                planner.choose(batch, replace(ALWAYS, micro_batches=count)) for count, planner in self._always.items()
            ]
            splits = [option for option in options if isinstance(option, SplitChoice)]
            self._options[batch] = tuple(sorted(splits, key=lambda option: option.prediction.split))
        return self._options[batch]

    def halve(self, batch: Batch) -> SplitChoice:
        """Return ping-pong of two micro-batches, as without costs."""
        cut = measure_cut(batch, place_cuts(batch, share_evenly(batch, 2)))
        return replace(self.choose_best(batch), order=self._ping_pong, cut=cut)


class Machine:
    """One machine of a row: what each of its steps takes by each policy."""

    def __init__(self, case: Case, row: Row, number: int) -> None:
        self._case = case
        self._truth = Truth(case.case, row, number)
        self._seed = f"{case.case.name} {row.name} {number}"
        self._batches = draw_steps(random.Random(f"{case.case.name} {number}"))
        self._unsplit = {batch: self._truth.time_unsplit(batch) for batch in self._batches}

    def list_gains(self) -> dict[str, list[float]]:
        """Return the gain of each step by policy [steps]."""
        case = self._case
        fixed: dict[str, Callable[[Batch], SplitChoice | None]] = {
            ALWAYS_SPLIT: case.choose_best,
            VLLM: lambda batch: case.halve(batch) if splits_vllm(batch) else None,
            ASCEND: lambda batch: case.halve(batch) if splits_ascend(batch) else None,
        }
        gains = {
            BEFORE: self._serve(case.before, GATED),
            DOUBT: self._serve(case.after, GATED),
            AFTER: self._serve(case.after, AUTO),
        }
        for name, choose in fixed.items():
            choices = [(batch, choose(batch)) for batch in self._batches]
            gains[name] = [self._measure_gain(batch, choice) for batch, choice in choices]
        gains[HINDSIGHT] = [
            max(0.0, *(self._measure_gain(batch, option) for option in case.list_options(batch)))
            for batch in self._batches
        ]
        return gains

    def _measure_gain(self, batch: Batch, choice: SplitChoice | None) -> float:
        return 0.0 if choice is None else 1.0 - self._truth.time_split(batch, choice) / self._unsplit[batch]

    def _serve(self, planner: Planner, config: RuntimeConfig) -> list[float]:
        """Serve the steps in random order; return what each gained over all its times [steps]."""
        planner.memory.forget()
        rng = random.Random(self._seed)
        gains: dict[Batch, list[float]] = {batch: [] for batch in self._batches}
        known: dict[tuple[Batch, str, tuple[int, ...]], float] = {}
        for _ in range(SERVED):
            batch, noise = rng.choice(self._batches), draw_noise(rng)
            decision = planner.choose(batch, config)
            if isinstance(decision, Decline):
                mode, expected, gain = UNSPLIT, decision.expected, 0.0
            else:
                key = batch, decision.order.name, tuple(piece.size for piece in decision.slices)
                if key not in known:
                    known[key] = self._measure_gain(batch, decision)
                mode, expected, gain = SPLIT, decision.prediction.split, known[key]
            gains[batch].append(gain)
            if expected is not None:
                planner.memory.observe(
                    mode, expected, self._unsplit[batch] * (1.0 - gain) * noise, decision.trial_class
                )
            if planner.memory.correction.count():
                planner.memory.apply([planner.memory.propose()])
        return [mean(of_batch) for of_batch in gains.values()]


def prepare(program: Program, table: CostTable, config: RuntimeConfig = AUTO) -> Planner:
    """Return a planner that is prepared as when serving."""
    planner = Planner(program, table)
    planner.prepare(config)
    return planner


def draw_noise(rng: random.Random) -> float:
    """Draw by which factor a measured time is longer than the step's."""
    return math.exp(rng.gauss(0.0, NOISE)) * (rng.uniform(1.0, 3.0) if rng.random() < OUTLIERS else 1.0)


def draw_steps(rng: random.Random) -> tuple[Batch, ...]:
    """Draw the steps that a machine serves."""
    draw = (draw_prompts, draw_prompts, draw_mixed, draw_decodes)
    return tuple(draw[number % len(draw)](rng) for number in range(STEPS))


def draw_prompts(rng: random.Random) -> Batch:
    tokens = draw_size(rng, 32, 8192)
    edges = sorted(rng.sample(range(1, tokens), rng.randint(0, 5)))
    lengths = [end - start for start, end in zip([0, *edges], [*edges, tokens], strict=True)]
    return Batch(tuple(lengths), tokens, context_lens=tuple(rng.choices(CONTEXTS, k=len(lengths))))


def draw_mixed(rng: random.Random) -> Batch:
    prompts, decodes = draw_prompts(rng), draw_decodes(rng)
    lengths, contexts = decodes.query_lens + prompts.query_lens, decodes.contexts + prompts.contexts
    return Batch(lengths, prompts.tokens, context_lens=contexts)


def draw_decodes(rng: random.Random) -> Batch:
    count = draw_size(rng, 8, 512)
    return Batch((1,) * count, 0, context_lens=tuple(rng.choices(CONTEXTS[2:], k=count)))


def draw_size(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def splits_vllm(batch: Batch) -> bool:
    """Whether vLLM's dual-batch overlap splits a step, by its default thresholds."""
    return batch.tokens >= (512 if batch.prefill_tokens else 32)


def splits_ascend(batch: Batch) -> bool:
    """Whether `auto` splits a step without costs, by the thresholds of vllm-ascend's former DBO."""
    return batch.tokens >= AUTO.min_tokens and batch.prefill_tokens >= AUTO.min_prefill_tokens


def measure_row(cases: Sequence[Case], row: Row) -> dict[str, list[float]]:
    """Return the gain of all steps of all machines by policy [steps]."""
    gains: dict[str, list[float]] = {}
    for case in cases:
        for number in range(FIRST, FIRST + MACHINES):
            for policy, of_machine in Machine(case, row, number).list_gains().items():
                gains.setdefault(policy, []).extend(of_machine)
    return gains


def describe(gains: Sequence[float]) -> str:
    """Return the mean gain and the worst loss in percent."""
    return f"{mean(gains):.1%} / {max(0.0, -min(gains)):.1%}".replace("%", "")


def tabulate(rows: Mapping[Row, Mapping[str, Sequence[float]]], policies: Sequence[str]) -> list[str]:
    """Return the table of some policies."""
    cells = [[row.name, *(describe(gains[policy]) for policy in policies)] for row, gains in rows.items()]
    return make_table(["truth", *policies], cells)


def test_steps_lose_nothing_where_lanes_slow_each_other(publish: Publish) -> None:
    cases = [Case(case) for case in list_cases() if case.name != OMITTED]
    rows = {row: measure_row(cases, row) for row in ROWS}
    steps = len(next(iter(rows.values()))[AFTER])
    missed = [
        f"{row.name}: {describe(gains[AFTER])}"
        for row, gains in rows.items()
        if -min(gains[AFTER]) > row.max_loss or mean(gains[HINDSIGHT]) - mean(gains[AFTER]) > MAX_BEHIND_HINDSIGHT
    ]
    lines = [
        *tabulate(rows, POLICIES),
        "",
        f"Mean gain / worst loss of {steps} steps a row, in percent of their unsplit time. *Simulated.* The same of "
        "`auto` and what it was before:",
        "",
        *tabulate(rows, STAGES),
        "",
        "- Target of `auto`: worst loss at most 1 % in the first three rows and 3 % in the fourth, mean gain within "
        f"one point of hindsight. {'Missed: ' + '; '.join(missed) if missed else 'Reached'}.",
    ]
    command = find_command(__file__, "-o python_files='bench_*.py'")
    publish("never-lose", f"DBO_BENCH_MACHINES={MACHINES} DBO_BENCH_FIRST={FIRST} {command}", lines)
    assert not missed
