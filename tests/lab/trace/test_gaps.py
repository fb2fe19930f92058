from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.devices import open_device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate, staggered
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.trace.gaps import DRAIN, FILL, HOST, NOTHING_LEFT, START, UNKNOWN, WAIT, Gap, find_gaps, sum_causes
from dbo_runtime.observe.timeline import Recorder, Span, Timeline
from tests.support.programs import record_three_lanes, record_toy

A, B = ("attention", 0), ("attention", 1)
FIRST = Span("compute", *A, 0.0, 4.0, 0.0)
SECOND = Span("compute", *B, 4.0, 8.0, 0.0)


def find_gaps_before(span: Span, *others: Span) -> list[tuple[float, float, str]]:
    """Return (start, end, cause) of the gaps before a span of lane `comm`, with two micro-batches on `compute`."""
    gaps = find_gaps(Timeline((FIRST, SECOND, *others, span)))
    return [(gap.start, gap.end, gap.cause) for gap in gaps if gap.before == (span.op, span.micro_batch)]


def test_until_every_micro_batch_has_begun_a_lane_that_waits_is_being_filled() -> None:
    assert find_gaps_before(Span("comm", "reduce", 0, 4.0, 5.0, 0.0, (A,))) == [(0.0, 4.0, FILL)]


def test_between_two_ops_a_lane_waits_for_the_last_op_that_it_was_told_to() -> None:
    sent = Span("comm", "reduce", 0, 4.0, 5.0, 0.0, (A,))
    received = Span("comm", "reduce", 1, 8.0, 9.0, 0.0, (A, B))
    after = Span("compute", "mlp", 0, 8.0, 9.0, 0.0, (("reduce", 0),))
    assert find_gaps(Timeline((FIRST, sent, SECOND, received, after))) == [
        Gap("comm", 0.0, 4.0, FILL, ("reduce", 0), A),
        Gap("comm", 5.0, 8.0, WAIT, ("reduce", 1), B),
    ]


def test_a_lane_that_has_run_all_it_had_is_left_nothing() -> None:
    gaps = find_gaps(Timeline((FIRST, SECOND, Span("comm", "reduce", 1, 8.0, 9.0, 0.0, (B,)))))
    assert gaps[0] == Gap("compute", 8.0, 9.0, NOTHING_LEFT)


def test_an_op_that_was_ready_but_not_issued_shows_a_slow_host_and_what_is_left_is_its_start() -> None:
    sent = Span("comm", "reduce", 0, 4.0, 5.0, 0.0, (A,))
    late = Span("comm", "gather", 0, 7.5, 8.0, 7.25, (A,))
    assert find_gaps_before(late, sent) == [(5.0, 7.25, HOST), (7.25, 7.5, START)]


def test_with_one_micro_batch_left_no_order_could_fill_a_wait() -> None:
    others = (Span("comm", "reduce", 0, 4.0, 5.0, 0.0, (A,)), Span("compute", "mlp", 0, 8.0, 9.0, 0.0))
    last = Span("comm", "reduce", 1, 12.0, 13.0, 0.0, (("mlp", 1),))
    slow = Span("compute", "mlp", 1, 9.0, 12.0, 0.0)
    assert find_gaps_before(last, *others, slow) == [(5.0, 9.0, WAIT), (9.0, 12.0, DRAIN)]


def test_of_one_micro_batch_alone_every_wait_is_part_of_its_way() -> None:
    gaps = find_gaps(Timeline((FIRST, Span("comm", "reduce", 0, 4.0, 6.0, 0.0, (A,)))))
    assert [(gap.lane, gap.cause) for gap in gaps] == [("compute", NOTHING_LEFT), ("comm", DRAIN)]


def test_what_was_not_noted_is_not_explained() -> None:
    gaps = find_gaps(Timeline((Span("compute", *A, 0.0, 1.0), Span("compute", *B, 2.0, 3.0))))
    assert gaps == [Gap("compute", 1.0, 2.0, UNKNOWN, B)]


def test_nothing_has_no_gaps() -> None:
    assert find_gaps(Timeline(())) == []
    assert sum_causes([]) == {}


@given(
    program=st.sampled_from([record_toy(3), record_three_lanes(2)]),
    parts=st.integers(1, 4),
    lead=st.integers(0, 3),
    seed=st.randoms(use_true_random=False),
)
def test_gaps_and_ops_fill_every_lane_and_each_cause_is_true(program: Program, parts: int, lead: int, seed) -> None:
    """On a virtual device the host is never late and handing over takes no time, so every wait has one cause."""
    programs = (program,) * parts
    schedule = lower(programs, staggered(programs, lead) if lead else alternate(programs))
    device = open_device("virtual", cost=lambda task: seed.choice((0.0, 0.5, 1.0, 3.0)))
    recorder = Recorder()
    state = ([1],) if len(program.inputs) == 1 else (0, 0)
    Executor(schedule, device, EventTable(device)).run([state] * parts, instrument=recorder)
    timeline = recorder.timeline()
    gaps = find_gaps(timeline)
    lost = sum_causes(gaps)
    for lane in timeline.lanes:
        assert timeline.busy(lane) + sum(lost.get(lane, {}).values()) == pytest.approx(timeline.duration)
    ends = {(span.op, span.micro_batch): span.end for span in timeline.spans}
    starts = {(span.op, span.micro_batch): span.start for span in timeline.spans}
    starts_of, ends_of = (
        {part: [time for (_, other), time in times.items() if other == part] for part in range(parts)}
        for times in (starts, ends)
    )
    for gap in gaps:
        assert gap.start < gap.end
        if gap.cause == NOTHING_LEFT:
            assert all(span.end <= gap.start for span in timeline.spans if span.lane == gap.lane)
            continue
        assert gap.cause in (FILL, WAIT, DRAIN)
        assert gap.awaited is not None
        assert gap.before is not None
        assert ends[gap.awaited] == starts[gap.before]
        if gap.cause == WAIT:  # all have begun, and another than this one has not ended yet
            begun, ended = (
                [f(times) for times in by_part.values()] for f, by_part in ((min, starts_of), (max, ends_of))
            )
            assert max(begun) <= gap.start
            assert sorted(ended)[-2] >= gap.end
