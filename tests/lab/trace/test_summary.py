from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dbo_runtime.devices.virtual import simulate
from dbo_runtime.ir.policies import sequential
from dbo_runtime.lab.trace.gaps import FILL, NOTHING_LEFT
from dbo_runtime.lab.trace.summary import measure_overlap, summarize
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.planner.search.bound import compute_bound, compute_bound_of
from dbo_runtime.planner.search.jobs import make_jobs
from tests.support.programs import lower_toy

# compute runs for 8 s of 10, comm for 6, both for 4.
STEP = Timeline(
    (
        Span("compute", "a", 0, 0.0, 4.0, 0.0),
        Span("compute", "a", 1, 4.0, 8.0, 0.0),
        Span("comm", "r", 0, 4.0, 7.0, 0.0, (("a", 0),)),
        Span("comm", "r", 1, 8.0, 10.0, 0.0, (("a", 1),)),
    ),
    bound=9.5,
)


def test_a_summary_has_what_was_hidden_and_what_was_lost() -> None:
    summary = summarize(STEP)
    assert (summary.duration, summary.busy) == (10.0, {"compute": 8.0, "comm": 5.0})
    assert summary.hidden == pytest.approx(3 / 5)
    assert summary.overlap == pytest.approx(1 - (10 - 8) / 5)
    assert summary.efficiency == pytest.approx(0.95)
    assert summary.lost["compute"] == {NOTHING_LEFT: 2.0}
    assert summary.lost["comm"][FILL] == 4.0
    assert json.loads(json.dumps(summary.as_dict()))["efficiency"] == summary.efficiency


def test_people_read_milliseconds_and_shares() -> None:
    text = str(summarize(STEP))
    assert text.startswith("10000.00 ms; lanes busy: compute 8000.00, comm 5000.00 ms\n")
    assert "60.0% of the communication was hidden behind computation; E_overlap 60.0%" in text
    assert "LB/T 0.950" in text
    assert "compute idle for 2000.00 ms: nothing left 2000.00" in text


def test_the_planning_time_is_told_where_it_was_recorded() -> None:
    planned = summarize(replace(STEP, planning=0.00125))
    assert (planned.planning, planned.as_dict()["planning"]) == (0.00125, 0.00125)
    assert "\nplanning took 1.250 ms before the first op\n" in str(planned)
    assert summarize(STEP).as_dict()["planning"] is None
    assert "planning" not in str(summarize(STEP))


def test_a_step_without_overlap_has_none_and_one_that_hides_all_has_all() -> None:
    serial = simulate(lower_toy(policy=sequential), lambda step: 1.0, 0.0)
    by_hand = tuple(
        Span(span.lane, span.op, span.micro_batch, float(n), n + 1.0) for n, span in enumerate(serial.spans)
    )
    assert measure_overlap(Timeline(by_hand)) == 0.0
    hidden = Timeline((Span("compute", "a", 0, 0.0, 4.0), Span("comm", "r", 1, 1.0, 3.0)))
    assert measure_overlap(hidden) == 1.0


def test_where_nothing_communicates_there_is_nothing_to_say_about_overlap() -> None:
    summary = summarize(Timeline((Span("compute", "a", 0, 0.0, 4.0),)))
    assert (summary.hidden, summary.overlap, summary.efficiency) == (None, None, None)
    assert "E_overlap" not in str(summary)
    assert "LB/T" not in str(summary)


def test_of_nothing_the_summary_is_nothing() -> None:
    assert summarize(Timeline(())).duration == 0.0


@pytest.mark.parametrize("policy", [sequential, None])
def test_the_bound_of_a_timeline_is_that_of_its_ops_whatever_their_order(policy) -> None:
    schedule = lower_toy() if policy is None else lower_toy(policy=policy)
    seconds = [[0.25 * (1 + (3 * n + part) % 5) for n in range(len(p.ops))] for part, p in enumerate(schedule.programs)]
    timeline = simulate(schedule, lambda step: seconds[step.issue.micro_batch][step.issue.position])
    assert compute_bound_of(timeline, schedule) == pytest.approx(compute_bound(make_jobs(schedule.programs, seconds)))
    assert compute_bound_of(timeline, schedule) <= timeline.duration
