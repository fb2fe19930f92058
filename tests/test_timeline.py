from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.observe.timeline import Recorder, Span, Timeline
from tests.support.programs import lower_toy


def make_timeline(*spans: tuple[str, str, int, float, float]) -> Timeline:
    return Timeline(tuple(Span(*span) for span in spans))


OVERLAPPING = make_timeline(
    ("compute", "attention", 0, 10.0, 14.0),
    ("comm", "reduce", 0, 14.0, 18.0),
    ("compute", "attention", 1, 15.0, 17.0),
    ("compute", "mlp", 0, 18.0, 20.0),
)


def test_lanes_come_in_order_of_first_use() -> None:
    assert OVERLAPPING.lanes == ("compute", "comm")


def test_the_duration_is_from_first_start_to_last_end() -> None:
    assert OVERLAPPING.duration == 10


def test_busy_time_is_counted_once_where_spans_overlap_or_touch() -> None:
    assert OVERLAPPING.busy("compute") == 8
    assert OVERLAPPING.busy("comm") == 4
    assert make_timeline(("a", "x", 0, 0, 4), ("a", "y", 0, 1, 2), ("a", "z", 0, 4, 5)).busy("a") == 5


def test_overlap_is_when_both_lanes_are_busy() -> None:
    assert OVERLAPPING.overlap("compute", "comm") == OVERLAPPING.overlap("comm", "compute") == 2
    assert OVERLAPPING.overlap("compute", "compute") == 8


def test_lanes_that_only_touch_do_not_overlap() -> None:
    assert make_timeline(("a", "x", 0, 0, 1), ("b", "y", 0, 1, 2)).overlap("a", "b") == 0


def test_communication_is_hidden_by_any_lane_that_computes() -> None:
    timeline = make_timeline(
        ("compute", "a", 0, 0.0, 2.0),
        ("comm", "b", 0, 1.0, 5.0),
        ("side", "c", 0, 1.5, 3.0),
        ("aux", "d", 1, 2.5, 4.0),
    )
    assert timeline.measure_hidden() == (4.0 + 1.5, 2.0 + 0.5)  # c hides what a does not, and is no communication
    assert OVERLAPPING.measure_hidden() == (4, 2)
    assert Timeline(()).measure_hidden() == (0, 0)


def test_the_concurrent_share_is_of_the_same_micro_batch_or_of_others() -> None:
    timeline = make_timeline(
        ("side", "L0.keys", 0, 0.0, 4.0),
        ("compute", "L0.queries", 0, 1.0, 3.0),
        ("compute", "L0.queries", 1, 3.0, 4.0),
    )
    assert timeline.measure_concurrent_share("keys", "queries", same=True) == 0.5
    assert timeline.measure_concurrent_share("keys", "queries") == 0.25


def test_concurrent_seconds_are_those_in_which_any_other_lane_ran() -> None:
    timeline = make_timeline(
        ("compute", "a", 0, 10.0, 20.0),
        ("comm", "b", 1, 5.0, 12.0),
        ("copy", "c", 1, 11.0, 14.0),  # partly concurrent with b, too
        ("comm", "d", 1, 18.0, 18.5),
        ("compute", "e", 0, 20.0, 21.0),
        ("comm", "f", 1, 21.0, 22.0),  # touches e, no more
    )
    assert timeline.measure_concurrent() == [4.5, 2.0, 3.0, 0.5, 0.0, 0.0]
    assert Timeline(()).measure_concurrent() == []


def test_for_a_side_lane_only_concurrent_computation_counts() -> None:
    timeline = make_timeline(
        ("side", "keys", 0, 0.0, 4.0), ("comm", "reduce", 1, 0.0, 3.0), ("compute", "queries", 0, 2.0, 3.0)
    )
    assert timeline.measure_concurrent() == [1.0, 3.0, 1.0]


spans_in_halves = st.lists(
    st.builds(
        lambda lane, start, length: Span(lane, "x", 0, start / 2, (start + length) / 2),
        st.sampled_from(["compute", "comm", "aux"]),
        st.integers(0, 40),
        st.integers(0, 12),
    ),
    max_size=12,
)


@given(spans_in_halves)
def test_concurrent_and_idle_seconds_are_those_that_counting_moments_finds(spans: list[Span]) -> None:
    """Spans begin and end at half seconds, so every half second is either within a span or outside it."""
    running = [{number for number, span in enumerate(spans) if span.start <= half / 2 < span.end} for half in range(60)]
    lanes = [{spans[number].lane for number in numbers} for numbers in running]
    timeline = Timeline(tuple(spans))
    assert timeline.measure_concurrent() == [
        sum(number in numbers and lane != {span.lane} for numbers, lane in zip(running, lanes, strict=True)) / 2
        for number, span in enumerate(spans)
    ]
    begin, end = (min(s.start for s in spans), max(s.end for s in spans)) if spans else (0, 0)
    assert timeline.idle == sum(not lane and begin <= half / 2 < end for half, lane in enumerate(lanes)) / 2


def test_idle_time_is_when_no_lane_runs_anything() -> None:
    assert OVERLAPPING.idle == 0
    gaps = make_timeline(("a", "x", 0, 5, 6), ("b", "y", 0, 8, 9), ("a", "z", 0, 8.5, 10), ("b", "z", 1, 10.5, 11))
    assert gaps.idle == 2.5
    assert Timeline(()).idle == 0


def test_a_lane_that_is_not_there_is_never_busy() -> None:
    assert OVERLAPPING.busy("aux") == OVERLAPPING.overlap("aux", "comm") == 0


def test_ops_are_concurrent_only_where_they_are_of_different_micro_batches() -> None:
    timeline = make_timeline(
        ("comm", "L1.dispatch", 0, 0.0, 4.0),
        ("compute", "L1.experts", 1, 1.0, 3.0),  # 2 s during the first dispatch
        ("comm", "L2.dispatch", 1, 4.0, 10.0),
        ("compute", "L2.experts", 1, 4.0, 8.0),  # the same micro-batch's
        ("compute", "L2.experts", 0, 9.0, 11.0),  # 1 s during the second
    )
    assert timeline.measure_concurrent_share("dispatch", "experts") == 3 / 10
    assert timeline.measure_concurrent_share("experts", "dispatch") == 3 / 8


def test_time_concurrent_with_several_micro_batches_counts_once() -> None:
    timeline = make_timeline(
        ("comm", "dispatch", 0, 0.0, 4.0), ("compute", "experts", 1, 0.0, 2.0), ("compute", "experts", 2, 1.0, 3.0)
    )
    assert timeline.measure_concurrent_share("dispatch", "experts") == 3 / 4


def test_an_op_that_never_ran_is_concurrent_with_nothing() -> None:
    assert (
        OVERLAPPING.measure_concurrent_share("dispatch", "mlp")
        == OVERLAPPING.measure_concurrent_share("mlp", "dispatch")
        == 0
    )


def test_the_drawing_has_a_row_for_each_lane_and_a_digit_for_each_micro_batch() -> None:
    assert OVERLAPPING.draw(width=10).splitlines() == [
        " compute |0000.11.00|",
        "    comm |....0000..|",
    ]


def test_an_op_too_short_for_the_drawing_is_drawn_all_the_same() -> None:
    row = make_timeline(("a", "x", 0, 0, 100), ("b", "y", 1, 99.999, 100)).draw(width=10).splitlines()[1]
    assert row == "       b |.........1|"


def test_a_drawing_of_something_that_took_no_time_keeps_its_width() -> None:
    assert make_timeline(("a", "x", 3, 5, 5)).draw(width=4) == "       a |3...|"


def test_nothing_is_drawn_as_such() -> None:
    empty = Timeline(())
    assert empty.draw() == "(nothing ran)"
    assert empty.duration == 0


def test_the_table_lists_the_first_spans_in_milliseconds() -> None:
    rows = OVERLAPPING.table(most=2).splitlines()
    assert rows[1].split() == ["0.00", "4000.00", "attention/0"]
    assert rows[2].split() == ["4000.00", "4000.00", "reduce/0"]
    assert rows[2].index("reduce/0") == rows[0].index("comm")
    assert rows[3] == "... and 2 more"


@pytest.mark.parametrize("most", [4, 5])
def test_a_table_that_shows_all_says_nothing_of_more(most: int) -> None:
    assert len(OVERLAPPING.table(most).splitlines()) == 5


def test_a_recorder_keeps_spans_by_start() -> None:
    recorder = Recorder()
    first, second = lower_toy().instructions[1:3]
    recorder.observe(second, 0.5, 2.0, 3.0)
    recorder.observe(first, 0.25, 1.0, 2.0)
    assert recorder.timeline().spans == (
        Span("compute", "L0.attention", 0, 1.0, 2.0, 0.25),
        Span("comm", "L0.attn_reduce", 0, 2.0, 3.0, 0.5, (("L0.attention", 0),)),
    )


def test_a_timeline_comes_back_from_plain_data_and_from_json() -> None:
    waits = (("L0.attention", 0), ("L0.attention", 1))
    timeline = Timeline((Span("comm", "reduce", 1, 1.0, 2.0, 0.5, waits), Span("compute", "a", 0, 0.1, 0.2)), 1.5, 2e-4)
    data = timeline.as_dict()
    assert Timeline.from_dict(data) == Timeline.from_dict(json.loads(json.dumps(data))) == timeline
    del data["planning"]  # which older versions do not send
    assert Timeline.from_dict(data) == replace(timeline, planning=None)
