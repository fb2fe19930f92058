"""Predict the gain of splitting a step on a machine known only by its costs: no device, no model, no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.whatif.estimate import Estimator, resize_batch
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.named_order import compute_end
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.search.bound import compute_bound
from dbo_runtime.planner.search.jobs import make_jobs
from dbo_runtime.planner.search.search import ROUNDING, find_order

PROOF_SEARCH_STATES = 500_000  # states of the search that proves an order of two micro-batches optimal: takes seconds


@dataclass(frozen=True, slots=True)
class Split:
    """A step split into micro-batches.

    Attributes:
        sizes: tokens of each micro-batch.
        order: name of the issue order.
        seconds: duration of the step.
        bound: seconds that no order can beat with these cuts.
        timeline: intervals of the ops.
        side_ops: names of the ops on the `side` lane.
    """

    sizes: tuple[int, ...]
    order: str
    seconds: float
    bound: float
    timeline: Timeline
    side_ops: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Largest share of its time by which the step may be slower than with the best order."""
        return max(1.0 - self.bound / self.seconds, 0.0) if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no order can be faster."""
        return self.seconds * (1.0 - ROUNDING) <= self.bound


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step, unsplit and split. Times are in seconds.

    Attributes:
        batch: the requests of the step.
        unsplit: duration of the unsplit step.
        busy: time that ops take in the unsplit step, by lane, `compute` first.
        splits: splits by ascending number of micro-batches; numbers that the step cannot be cut into are left out.
        timeline: timeline of the unsplit step.
        decision: the decision that the runtime would take.
    """

    batch: Batch
    unsplit: float
    busy: Mapping[str, float]
    splits: tuple[Split, ...]
    timeline: Timeline
    decision: SplitChoice | Decline

    @property
    def best(self) -> Split | None:
        """The fastest split, even if slower than unsplit; None if the step cannot be cut."""
        return min(self.splits, key=lambda split: split.seconds, default=None)

    def speed_up(self, seconds: float) -> float:
        """Return the speed-up of a step of *seconds* over the unsplit step."""
        return self.unsplit / seconds if seconds > 0 else 1.0

    def measure_overlap(self, split: Split) -> float | None:
        """Return E_overlap = 1 - ECT / ECT_serial, with ECT = time of the step - compute time of the unsplit step.

        Unlike the share of communication that is concurrent with compute, it decreases if splitting makes compute
        slower. None if there is nothing to hide.
        """
        serial = self.unsplit - self.busy.get(COMPUTE, 0.0)
        return 1.0 - (split.seconds - self.busy.get(COMPUTE, 0.0)) / serial if serial > 0 else None


class BreakEven(NamedTuple):
    """The number of tokens from which splitting, or ops on `side`, pay.

    Attributes:
        tokens: the smallest such number; None if there is none up to `searched_to`.
        searched_to: the largest number that was tried.
        exceptions: tried sizes above `tokens` at which it does not pay.
    """

    tokens: int | None
    searched_to: int
    exceptions: tuple[int, ...] = ()


def predict_step(table: CostTable, batch: Batch, config: RuntimeConfig) -> WhatIf:
    """Return the times of *batch* unsplit and split, with the cuts and orders that the runtime would choose.

    Raises:
        ConfigError: an op has no cost.
    """
    planner = Planner(build_program(table.program), table, shapes=[batch])
    predictor = Predictor(planner.program, table)
    (features,) = measure_slices(batch, slice_batch(batch, ()))
    always = [replace(config, mode="always", micro_batches=parts) for parts in planner.list_counts(config)]
    choices = [choice for choice in (planner.choose(batch, each) for each in always) if isinstance(choice, SplitChoice)]
    by_parts = {len(choice.slices): choice for choice in reversed(choices)}  # some batches do not allow this many cuts
    return WhatIf(
        batch=batch,
        unsplit=planner.predict_unsplit(features),
        busy=_sum_lanes(planner, features),
        splits=tuple(_measure(predictor, table, batch, by_parts[parts]) for parts in sorted(by_parts)),
        timeline=_draw_unsplit(planner, features),
        decision=planner.choose(batch, replace(config, mode="auto")),
    )


def list_tried_sizes(searched_to: int) -> list[int]:
    """Return the powers of two up to *searched_to*, in tokens."""
    return [1 << power for power in range(searched_to.bit_length())]


def compute_break_even(
    estimator: Estimator, batch: Batch, config: RuntimeConfig, searched_to: int, parts: int = 2
) -> BreakEven:
    """Return the number of tokens from which batches like *batch* would run in *parts* or more micro-batches.

    A single micro-batch counts if it has ops on `side`. The sizes of `list_tried_sizes` are tried; then the interval
    before the first one that pays is bisected. *estimator* is best made for steps of these sizes.
    """

    def pays(tokens: int) -> bool:
        options = estimator.list_options(resize_batch(batch, tokens), config)
        chosen = next((option for option in options if option.pays(config.margin)), None)
        return chosen is not None and chosen.micro_batches >= parts

    sizes = [size for size in list_tried_sizes(searched_to) if parts == 1 or size > 1]
    paying = [size for size in sizes if pays(size)]
    if not paying:
        return BreakEven(None, sizes[-1] if sizes else searched_to)
    low, high = paying[0] // 2, paying[0]
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return BreakEven(high, sizes[-1], tuple(size for size in sizes if size > high and size not in paying))


def _measure(predictor: Predictor, table: CostTable, batch: Batch, choice: SplitChoice) -> Split:
    """Predict a split by a simulation of all its ops, where the planner multiplies matrices."""
    slice_features = choice.cut.features
    timeline = predictor.simulate(choice.order.schedule, slice_features)
    seconds = table.host.time_split(compute_end(timeline), batch.tokens)
    bound = table.host.time_split(_compute_best_bound(table, choice.order.programs, slice_features), batch.tokens)
    sizes, side_ops = tuple(features.tokens for features in slice_features), choice.prediction.side_ops
    return Split(sizes, choice.order.name, seconds, min(bound, seconds), timeline, side_ops)


def _compute_best_bound(
    table: CostTable, programs: Sequence[Program], slice_features: Sequence[BatchFeatures]
) -> float:
    """Return seconds that no order can beat: for two micro-batches the optimum, if the search completes."""
    jobs = make_jobs(programs, [table.times(programs[0], features) for features in slice_features])
    return find_order(jobs, PROOF_SEARCH_STATES).bound if len(jobs) <= 2 else compute_bound(jobs)


def _draw_unsplit(planner: Planner, features: BatchFeatures) -> Timeline:
    """Draw the unsplit step: its ops in sequence, as the model runs them."""
    times = planner.table.times(planner.unsplit_program, features)
    ends = list(accumulate(times))
    spans = zip(planner.unsplit_program.ops, times, ends, strict=True)
    return Timeline(tuple(Span(op.lane, op.label, 0, end - seconds, end) for op, seconds, end in spans))


def _sum_lanes(planner: Planner, features: BatchFeatures) -> dict[str, float]:
    busy = {COMPUTE: 0.0}
    for op, seconds in zip(
        planner.unsplit_program.ops, planner.table.times(planner.unsplit_program, features), strict=True
    ):
        busy[op.lane] = busy.get(op.lane, 0.0) + seconds
    return busy
