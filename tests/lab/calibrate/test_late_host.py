"""Costs of a device that waits for its host: what the host takes is told from what ops take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate, sequential
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.lab.calibrate.fit import fit_costs
from dbo_runtime.lab.calibrate.measurement import StepSample
from dbo_runtime.lab.calibrate.samples import Sample, keep_queued, measure_late, read_samples
from dbo_runtime.lab.calibrate.shapes import Shape, choose_shapes
from dbo_runtime.lab.calibrate.step_fit import find_issue, fit_steps
from dbo_runtime.lab.oracle.searching_planner import SearchingPlanner
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost
from dbo_runtime.planner.online.simulation import predict_timeline
from dbo_runtime.vllm_plugin.api.dummy_batches import Limits
from tests.support.planner.machines import make_table, record_layers

LAYERS = 20
PROGRAM = record_layers(LAYERS, ("norm", "attention", "reduce"))
BYTES = 4096.0
COSTS = {
    "norm": ComputeCost(4e-6, 5e-9),
    "attention": ComputeCost(20e-6, 80e-9),
    "reduce": CommCost(20e-6, 30e-9 / BYTES, BYTES),
}
SLOW = HostCost(issue=150e-6, unsplit_issue=100e-6)  # as on the H100 of docs/hardware.md
TRUE = make_table(PROGRAM, COSTS, host=SLOW)
LIMITS = Limits(tokens=8192, length=8192, requests=64, blocks=2000, block_size=16)
ALTERNATE = RuntimeConfig(policy=("alternate", 0))
FAR = 0.5  # an error that decisions cannot be made by
CLOSE = 0.1


def run(order: Callable[..., Any], loads: Sequence[BatchFeatures]) -> Timeline:
    """Return the timeline that would be recorded of a step."""
    programs = (PROGRAM,) * len(loads)
    schedule = lower(programs, order(programs))
    times = [TRUE.times(PROGRAM, load) for load in loads]
    timeline = predict_timeline(schedule, lambda each: times[each.issue.micro_batch][each.issue.position], host=SLOW)
    return Timeline(tuple(record(schedule, timeline)))


def record(schedule: Schedule, timeline: Timeline) -> Iterator[Span]:
    """Yield the spans as events measure them: an op begins as soon as it could, and has its kernels one by one."""
    spans = {(span.op, span.micro_batch): span for span in timeline.spans}
    ends: dict[Any, float] = {}
    for number, instruction in enumerate(schedule.instructions):
        span, issued = spans[instruction.op.label, instruction.issue.micro_batch], number * SLOW.issue
        start = max([issued, ends.get(span.lane, 0.0), *(ends[issue] for issue in instruction.waits)])
        ends[span.lane] = ends[instruction.issue] = span.end
        yield span._replace(issued=issued, start=start)


def measure(shapes: Sequence[Shape]) -> tuple[list[Sample], list[StepSample]]:
    """Return what a calibration measures of these batches."""
    samples, steps = [], []
    for shape in shapes:
        whole = shape.measure_features()
        issued = SLOW.issue_unsplit(len(PROGRAM.ops))
        unsplit = max(sum(TRUE.times(PROGRAM, whole)), issued)
        steps.append(StepSample("unsplit", (whole,), unsplit, 0.0, issue=SLOW.unsplit_issue))
        for mode, order in (("sequential", sequential), ("alternate", alternate)):
            for cut in shape.cuts if mode == "sequential" else shape.cuts[:1]:
                loads = shape.measure_parts(cut)
                timeline = run(order, loads)
                samples += read_samples(timeline, loads)
                late = measure_late(timeline)
                steps.append(StepSample(mode, loads, timeline.duration, timeline.idle, late, timeline.measure_issue()))
    return samples, steps


def calibrate(shapes: Sequence[Shape], knows_host: bool = True) -> CostTable:
    """Return the costs that are fitted to that; as before the host was looked at, if asked to."""
    samples, steps = measure(shapes)
    if not knows_host:
        steps = [step._replace(late=0.0, issue=0.0) for step in steps]
    costs, errors = fit_costs(keep_queued(samples) if knows_host else samples, BYTES)
    return fit_steps(replace(TRUE, ops=costs, errors=errors, host=HostCost()), PROGRAM, steps)[0]


def find_errors(table: CostTable, sizes: Sequence[int]) -> list[float]:
    """Return the relative errors of predicted steps of these sizes, unsplit and split."""
    planner, true = SearchingPlanner(PROGRAM, table), SearchingPlanner(PROGRAM, TRUE)
    errors = []
    for size in sizes:
        whole, half = BatchFeatures(size), (BatchFeatures(size // 2),) * 2
        errors.append(planner.predict_unsplit(whole) / true.predict_unsplit(whole) - 1)
        errors.append(planner.predict_split(half, ALTERNATE) / true.predict_split(half, ALTERNATE) - 1)
    return errors


SIZES = (64, 512, 2048, 4096, 8192)


def test_steps_are_predicted_where_the_host_is_late_and_where_it_is_not() -> None:
    errors = find_errors(calibrate(choose_shapes(LIMITS)), SIZES)
    assert max(map(abs, errors)) < CLOSE, errors


def test_the_first_shapes_are_enough_of_a_short_calibration() -> None:
    singles = [shape for shape in choose_shapes(LIMITS) if shape.is_single_prefill]
    errors = find_errors(calibrate(singles), SIZES)
    assert max(map(abs, errors)) < CLOSE, errors


def test_without_looking_at_the_host_they_are_not() -> None:
    """So the test above can fail; small batches first, as far as a short time would go, are worse."""
    small = sorted(choose_shapes(LIMITS), key=lambda shape: shape.total)
    small = [shape for shape in small if shape.total <= 512]
    assert max(map(abs, find_errors(calibrate(small, knows_host=False), SIZES))) > FAR


def test_what_the_host_takes_is_found_again() -> None:
    host = calibrate(choose_shapes(LIMITS)).host
    assert (host.issue, host.unsplit_issue) == pytest.approx((SLOW.issue, SLOW.unsplit_issue))
    assert host.handover == pytest.approx(0.0, abs=1e-6)


def test_the_host_takes_what_it_did_with_the_batch_that_kept_it_least() -> None:
    def step(tokens: int, issue: float) -> StepSample:
        return StepSample("unsplit", (BatchFeatures(tokens),), 1.0, 0.0, issue=issue)

    assert find_issue([]) == 0.0
    assert find_issue([step(8, 3.0), step(8, 1.0), step(8, 2.0), step(9, 2.5)]) == 2.0


def test_an_op_was_queued_if_the_host_had_gone_on_before_it_began() -> None:
    spans = [
        Span("compute", "0.a", 0, 0.0, 1.0, 0.0),  # its kernels came one by one
        Span("compute", "0.b", 0, 3.0, 4.0, 1.0),
        Span("comm", "0.c", 0, 4.0, 5.0, 2.0),
        Span("compute", "0.d", 0, 4.5, 5.0, 4.0),  # the last of it was issued at 5, if it took the host as long
    ]
    timeline = Timeline(tuple(spans))
    assert timeline.find_queued() == [False, True, True, False]
    assert timeline.measure_issue() == 1.0
    unknown = Timeline(tuple(span._replace(issued=None) for span in spans))
    assert unknown.find_queued() == [True] * 4
    assert unknown.measure_issue() == 0.0
    assert Timeline(tuple(spans[:1])).find_queued() == [True]


def test_an_op_that_was_hardly_ever_queued_keeps_what_was_measured() -> None:
    def sample(op: str, tokens: int, was_queued: bool, concurrent: float = 0.0) -> Sample:
        return Sample(op, "compute", BatchFeatures(tokens), 1.0, concurrent, was_queued)

    known = [sample("a", 1, True), sample("a", 2, True), sample("a", 3, False)]
    unknown = [sample("b", 1, True), sample("b", 2, True, concurrent=0.5), sample("b", 3, False)]
    assert keep_queued([*known, *unknown]) == [*known[:2], *unknown]
