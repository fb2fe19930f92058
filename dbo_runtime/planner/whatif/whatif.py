"""What splitting a step would bring on a machine that is known by its costs only: no device, no model, no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.planner import Planner, SplitChoice
from dbo_runtime.planner.search.bound import compute_bound
from dbo_runtime.planner.search.jobs import make_jobs
from dbo_runtime.planner.search.search import ROUNDING, find_order
from dbo_runtime.planner.whatif.estimate import Estimator, resize_batch
from dbo_runtime.program import COMPUTE, Program

MOST_STATES = 500_000  # of the search that proves the order of two micro-batches best: seconds


@dataclass(frozen=True, slots=True)
class Split:
    """A step split into so many micro-batches.

    Attributes:
        sizes: tokens of each micro-batch.
        order: name of the issue order.
        seconds: what the step takes.
        bound: what no order could beat with these cuts, in seconds.
        timeline: when each op runs.
        beside: names of the ops that are on the `side` lane.
    """

    sizes: tuple[int, ...]
    order: str
    seconds: float
    bound: float
    timeline: Timeline
    beside: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """By which share of its time the step may be slower than with the best order."""
        return max(1.0 - self.bound / self.seconds, 0.0) if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no order is faster."""
        return self.seconds * (1.0 - ROUNDING) <= self.bound


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step, whole and split. Times are in seconds.

    Attributes:
        batch: what is in the step.
        whole: what it takes unsplit.
        busy: of that, what ops take, by lane, `compute` first.
        splits: ways to split it, by number of micro-batches; those that cannot be cut are left out.
        timeline: of the unsplit step.
        decision: of the gate, as the runtime would decide.
    """

    batch: Batch
    whole: float
    busy: Mapping[str, float]
    splits: tuple[Split, ...]
    timeline: Timeline
    decision: SplitChoice | Decline

    @property
    def best(self) -> Split | None:
        """The fastest split, whether it pays or not; None if the step cannot be cut."""
        return min(self.splits, key=lambda split: split.seconds, default=None)

    def speed_up(self, seconds: float) -> float:
        """Return how many times faster than unsplit a step of *seconds* is."""
        return self.whole / seconds if seconds > 0 else 1.0

    def measure_overlap(self, split: Split) -> float | None:
        """Return E_overlap = 1 - ECT / ECT_serial, with ECT = time of the step - compute of the unsplit one.

        Unlike the share of communication that runs beside compute, it charges for compute that gets slower by being
        split. None if there is nothing to hide.
        """
        serial = self.whole - self.busy.get(COMPUTE, 0.0)
        return 1.0 - (split.seconds - self.busy.get(COMPUTE, 0.0)) / serial if serial > 0 else None


class BreakEven(NamedTuple):
    """From which number of tokens on splitting pays, or having ops beside each other.

    Attributes:
        tokens: the smallest such number; None if there is none up to `most`.
        most: up to where was looked.
        exceptions: of the sizes looked at above `tokens`, those where it does not pay.
    """

    tokens: int | None
    most: int
    exceptions: tuple[int, ...] = ()


def predict_step(table: CostTable, batch: Batch, config: RuntimeConfig) -> WhatIf:
    """Return what *batch* takes whole and split, with the cuts and orders that the runtime would take.

    Raises:
        ConfigError: if the batch and the costs do not go together.
    """
    planner = Planner(build_program(table.program), table)
    (load,) = measure_slices(batch, slice_batch(batch, ()))
    always = [replace(config, mode="always", micro_batches=parts) for parts in planner.list_parts(config)]
    choices = [choice for choice in (planner.choose(batch, each) for each in always) if isinstance(choice, SplitChoice)]
    by_parts = {len(choice.slices): choice for choice in reversed(choices)}  # some batches cannot be cut that often
    return WhatIf(
        batch=batch,
        whole=planner.predict_unsplit(load),
        busy=_sum_lanes(planner, load),
        splits=tuple(_measure(planner, batch, by_parts[parts]) for parts in sorted(by_parts)),
        timeline=_draw_whole(planner, load),
        decision=planner.choose(batch, replace(config, mode="auto")),
    )


def compute_break_even(
    estimator: Estimator, batch: Batch, config: RuntimeConfig, most: int, parts: int = 2
) -> BreakEven:
    """Return from how many tokens on the runtime takes batches like *batch* in *parts* micro-batches or more.

    In 1 that is with ops on `side`: a step that is left whole is none. Powers of two are scanned up to *most*, and
    between the first that pays and the one before it is bisected.
    """

    def pays(tokens: int) -> bool:
        options = estimator.list_options(resize_batch(batch, tokens), config)
        chosen = next((option for option in options if option.pays(config.margin)), None)
        return chosen is not None and chosen.micro_batches >= parts

    sizes = [1 << power for power in range(int(parts > 1), most.bit_length())]
    paying = [size for size in sizes if pays(size)]
    if not paying:
        return BreakEven(None, sizes[-1] if sizes else most)
    low, high = paying[0] // 2, paying[0]
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return BreakEven(high, sizes[-1], tuple(size for size in sizes if size > high and size not in paying))


def _measure(planner: Planner, batch: Batch, choice: SplitChoice) -> Split:
    """Predict a split for its very loads, which the planner does for loads like them."""
    loads = measure_slices(batch, choice.slices)
    timeline = planner.draw_timeline(choice.order.schedule, loads)
    host = planner.table.host
    outside = host.split + host.split_per_token * sum(load.tokens for load in loads)
    seconds = max(max(span.end for span in timeline.spans) + outside, 0.0)
    bound = max(_find_bound(planner, choice.order.schedule.programs, loads) + outside, 0.0)
    sizes, beside = tuple(load.tokens for load in loads), choice.prediction.beside
    return Split(sizes, choice.order.name, seconds, min(bound, seconds), timeline, beside)


def _find_bound(planner: Planner, programs: Sequence[Program], loads: Sequence[BatchFeatures]) -> float:
    """Return what no order beats: of two micro-batches the proven optimum where it is found in time."""
    jobs = make_jobs(programs, [planner.table.times(planner.program, load) for load in loads])
    return find_order(jobs, MOST_STATES).bound if len(jobs) <= 2 else compute_bound(jobs)


def _draw_whole(planner: Planner, load: BatchFeatures) -> Timeline:
    """Draw the unsplit step: its ops one after the other, as a model runs that nobody split."""
    times = planner.table.times(planner.plain, load)
    ends = list(accumulate(times))
    spans = zip(planner.plain.ops, times, ends, strict=True)
    return Timeline(tuple(Span(op.lane, op.label, 0, end - seconds, end) for op, seconds, end in spans))


def _sum_lanes(planner: Planner, load: BatchFeatures) -> dict[str, float]:
    busy = {COMPUTE: 0.0}
    for op, seconds in zip(planner.plain.ops, planner.table.times(planner.plain, load), strict=True):
        busy[op.lane] = busy.get(op.lane, 0.0) + seconds
    return busy
