from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.devices.virtual import simulate
from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.observe.trace import make_trace, save_trace
from tests.support.observe.recorded_runs import TOY, record_run
from tests.support.observe.trace_format import check_format, find_enclosing
from tests.support.programs import lower_toy

TIMES = st.floats(0, 0.01) | st.integers(0, 5000).map(lambda nanoseconds: nanoseconds * 1e-9)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Up to three lanes that run one op after another, from any origin."""
    spans = []
    for lane in draw(st.lists(st.sampled_from(["compute", "comm", "aux"]), unique=True)):
        end = draw(st.floats(0, 1e5))
        for pause, length in draw(st.lists(st.tuples(TIMES, TIMES), max_size=8)):
            start = end + pause
            end = start + length
            spans.append(Span(lane, f"L{len(spans)}.op", len(spans) % 2, start, end))
    return Timeline(tuple(spans))


def find_ops(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def find_metadata(trace: Mapping[str, Any], what: str) -> list[tuple[int | None, Any]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == what]
    return [(event.get("tid"), *event["args"].values()) for event in found]


def read_as_perfetto(microseconds: float) -> int:
    """Return nanoseconds the way Perfetto's `CoerceToTs` does."""
    return int(microseconds * 1000.0)


def test_the_process_bears_the_title() -> None:
    assert find_metadata(make_trace({"rank 3": TOY}), "process_name") == [(None, "rank 3")]


def test_each_lane_is_a_track_and_compute_comes_first() -> None:
    timeline = Timeline((Span("comm", "recv", 0, 0, 1), Span("aux", "copy", 0, 0, 1), Span("compute", "norm", 0, 1, 2)))
    trace = make_trace({"step": timeline})
    assert find_metadata(trace, "thread_name") == [(101, "compute"), (102, "comm"), (103, "aux")]
    assert find_metadata(trace, "thread_sort_index") == [(101, 101), (102, 102), (103, 103)]
    assert [(event["tid"], event["cat"]) for event in find_ops(trace)] == [
        (102, "comm"),
        (103, "aux"),
        (101, "compute"),
    ]


def test_an_op_is_an_event_in_microseconds_since_the_first_start() -> None:
    timeline = Timeline((Span("compute", "a", 0, 100.0, 100.5), Span("comm", "b", 1, 100.25, 101.0)))
    events = [(e["name"], e["ts"], e["dur"]) for e in find_ops(make_trace({"step": timeline}))]
    assert events == [("a/0", 0, 500_000), ("b/1", 250_000, 750_000)]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("L3.attention", {"micro_batch": 1, "layer": 3}),
        ("L60.experts", {"micro_batch": 1, "layer": 60}),
        ("final_norm", {"micro_batch": 1}),
        ("L3", {"micro_batch": 1}),  # an op of that name, outside any layer
    ],
)
def test_the_arguments_name_the_micro_batch_and_the_layer_if_there_is_one(op: str, args: dict[str, int]) -> None:
    (event,) = find_ops(make_trace({"step": Timeline((Span("compute", op, 1, 0, 1),))}))
    assert event["name"] == f"{op}/1"
    assert event["args"] == {"op": op, **args}


def test_a_micro_batch_has_its_colour_in_every_timeline() -> None:
    alone = Timeline(tuple(span for span in TOY.spans if span.micro_batch == 1))
    colours = {
        (event["args"]["micro_batch"], event["cname"])
        for t in (TOY, alone)
        for event in find_ops(make_trace({"step": t}))
    }
    assert len(colours) == len(dict(colours)) == len({colour for _, colour in colours}) == 2


def test_no_micro_batch_is_too_many_for_the_colours() -> None:
    assert find_ops(make_trace({"step": Timeline((Span("compute", "a", 1000, 0, 1),))}))[0]["cname"]


def test_every_nanosecond_is_what_perfetto_reads() -> None:
    lengths = range(990, 1100)  # 1001 ns is 1.001 us, of which `int(1.001 * 1000.0)` makes 1000
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    timeline = Timeline(tuple(Span("compute", "a", 0, start * 1e-9, end * 1e-9) for start, end in pairwise(starts)))
    events = [(read_as_perfetto(e["ts"]), read_as_perfetto(e["dur"])) for e in find_ops(make_trace({"step": timeline}))]
    assert events == list(zip(starts, lengths, strict=False))


@given(timelines())
def test_no_event_is_early_or_crosses_another_on_its_track(timeline: Timeline) -> None:
    ops = find_ops(make_trace({"step": timeline}))
    assert min((event["ts"] for event in ops), default=0) == 0
    for track in {event["tid"] for event in ops}:
        starts, lengths = ([read_as_perfetto(e[key]) for e in ops if e["tid"] == track] for key in ("ts", "dur"))
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        assert min(lengths) >= 0
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("timeline", [TOY, simulate(lower_toy(layers=61), lambda step: 1e-3 / 7)])
def test_the_lengths_on_a_track_add_up_to_how_long_its_lane_was_busy(timeline: Timeline) -> None:
    ops = find_ops(make_trace({"step": timeline}))
    assert len(ops) == len(timeline.spans)
    for lane in timeline.lanes:
        lengths = [event["dur"] for event in ops if event["cat"] == lane]
        assert sum(lengths) == pytest.approx(timeline.busy(lane) * 1e6, abs=1e-3 * len(lengths))


def test_of_nothing_there_is_only_the_process() -> None:
    assert [event["name"] for event in make_trace({"step": Timeline(())})["traceEvents"]] == [
        "process_name",
        "process_sort_index",
    ]


@pytest.mark.parametrize("kind", [str, Path])
def test_the_file_holds_the_trace(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_trace({"of a “step”": TOY}, kind(path))
    assert json.loads(path.read_text()) == make_trace({"of a “step”": TOY})
    assert make_trace({"toy": TOY})["displayTimeUnit"] == "ms"


def test_a_file_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "step.json"
    with pytest.raises(ConfigError, match=r"No such file or directory.*name a file in a folder that exists") as caught:
        save_trace({"toy": TOY}, path)
    assert str(path) in str(caught.value)


def find_phase(trace: Mapping[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("timelines", [{"planned": TOY}, {"rank 0": record_run(), "rank 1": record_run(3)}])
def test_a_trace_keeps_to_the_published_format(timelines: dict[str, Timeline]) -> None:
    check_format(json.loads(json.dumps(make_trace(timelines))))


def test_ranks_are_processes_on_one_clock() -> None:
    first, second = (Timeline((Span("compute", "a", 0, start, start + 1),)) for start in (5.0, 5.5))
    trace = make_trace({"rank 0": first, "rank 1": second})
    assert [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"] == [
        (1, "rank 0"),
        (2, "rank 1"),
    ]
    assert [(event["pid"], event["ts"]) for event in find_ops(trace)] == [(1, 0), (2, 500_000)]


def test_the_host_has_a_track_with_each_issue_where_it_is_known() -> None:
    timeline = Timeline((Span("compute", "a", 0, 1.0, 2.0, 0.5), Span("comm", "b", 1, 2.0, 3.0, 0.75, (("a", 0),))))
    trace = make_trace({"step": timeline})
    assert find_metadata(trace, "thread_name")[0] == (100, "host")
    assert [(event["name"], event["tid"], event["ts"]) for event in find_phase(trace, "i")] == [
        ("a/0", 100, 0),
        ("b/1", 100, 250_000),
    ]
    assert (100, "host") not in find_metadata(make_trace({"step": TOY}), "thread_name")


def test_an_arrow_leads_from_each_op_that_was_waited_for() -> None:
    timeline = record_run()
    trace = make_trace({"step": timeline})
    tails = {event["id"]: event for event in find_phase(trace, "s")}
    found = set()
    for tip in find_phase(trace, "f"):
        (source,), (target,) = (find_enclosing(trace["traceEvents"], end) for end in (tails[tip["id"]], tip))
        found.add(tuple((op["args"]["op"], op["args"]["micro_batch"]) for op in (source, target)))
    waits = {(awaited, (span.op, span.micro_batch)) for span in timeline.spans for awaited in span.waits}
    assert found == waits
    assert waits


def test_an_op_too_short_to_be_seen_has_no_arrow() -> None:
    timeline = Timeline((Span("compute", "a", 0, 1.0, 1.0, 0.5), Span("comm", "b", 0, 1.0, 2.0, 0.5, (("a", 0),))))
    trace = make_trace({"step": timeline})
    check_format(trace)
    assert not find_phase(trace, "s")


def test_where_a_folder_has_become_a_file_that_is_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to path .*\(errno \d+, Not a directory\)"):
        save_trace({"toy": TOY}, tmp_path / "folder" / "step.json")


def test_a_file_that_could_not_be_finished_is_not_left_half_written(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.mkdir()  # so that it cannot be replaced
    with pytest.raises(ConfigError, match="cannot be written"):
        save_trace({"toy": TOY}, path)
    assert list(tmp_path.iterdir()) == [path]
