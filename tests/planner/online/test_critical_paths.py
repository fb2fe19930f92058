"""Critical paths, against a simulation of the same step and small sums by hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.planner.costs.cost_table import HostCost
from dbo_runtime.planner.online.critical_paths import CriticalPaths, list_different
from dbo_runtime.planner.online.durations import DurationLayout, Vector
from dbo_runtime.planner.online.named_order import compute_end
from dbo_runtime.planner.online.simulation import predict_timeline
from tests.support.planner.priced_programs import Layered, layered
from tests.support.planner.shop import do_nothing
from tests.support.profiles import scale


class Timed(NamedTuple):
    """A schedule, and durations of some steps [steps, durations]. They are integers, so that sums are exact."""

    case: Layered
    durations: Vector
    host_computes: bool

    @property
    def layout(self) -> DurationLayout:
        return DurationLayout(self.case.program, self.case.micro_batches)

    @property
    def paths(self) -> CriticalPaths:
        return CriticalPaths(self.case.schedule, self.layout, self.host_computes)


@st.composite
def timed(draw: st.DrawFn) -> Timed:
    case = draw(layered(with_host_sync=True))
    layout = DurationLayout(case.program, case.micro_batches)
    host = st.sampled_from([0, 0, 1, 2, 5])
    rows = [
        [*(draw(st.integers(0, 9)) for _ in range(layout.size - 2)), draw(host), draw(host)]
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Timed(case, np.array(rows, dtype=np.float64), draw(st.booleans()))


def simulate(schedule: Schedule, layout: DurationLayout, durations: Vector, host_computes: bool = False) -> float:
    """Return when a step ends whose durations are these [durations]."""

    def look_up(instruction: Instruction) -> float:
        return float(durations[layout.find_op(instruction.issue.micro_batch, instruction.op.name)])

    def look_up_credit(instruction: Instruction) -> float:
        place = layout.find_credit(instruction.issue.micro_batch, instruction.op.name)
        return 0.0 if place is None else float(durations[place])

    host = HostCost(float(durations[layout.issue]), handover=float(durations[layout.handover]), computes=host_computes)
    return compute_end(predict_timeline(schedule, look_up, host=host, credit=look_up_credit))


@settings(max_examples=scale(400))
@given(timed())
def test_a_step_ends_when_a_simulation_says(timed: Timed) -> None:
    ends, paths = timed.paths.find(timed.durations)
    expected = [simulate(timed.case.schedule, timed.layout, row, timed.host_computes) for row in timed.durations]
    assert ends.tolist() == expected
    assert (paths * timed.durations).sum(axis=1).tolist() == expected


@settings(max_examples=scale(200))
@given(timed())
def test_a_path_of_one_step_is_a_bound_for_any_other(timed: Timed) -> None:
    ends, paths = timed.paths.find(timed.durations)
    assert (timed.durations @ paths.T <= ends[:, None]).all()


@settings(max_examples=scale(100))
@given(timed(), st.floats(1e-6, 1e-3))
def test_seconds_of_any_size_are_rounded_by_nearly_nothing(timed: Timed, unit: float) -> None:
    durations = timed.durations * unit
    ends, paths = timed.paths.find(durations)
    expected = [simulate(timed.case.schedule, timed.layout, row, timed.host_computes) for row in durations]
    assert ends == pytest.approx(expected, rel=1e-9)
    assert (paths * durations).sum(axis=1) == pytest.approx(expected, rel=1e-9)


class Counted(NamedTuple):
    """What is on a critical path: how often each op, a credit, an issue and a handover is."""

    ops: dict[str, int]
    credits: int
    issues: int
    handovers: int


@pytest.mark.parametrize(
    ("host", "credit", "host_computes", "end", "counted"),
    [
        ((0.0, 0.0), 0.0, False, 14.0, Counted({"make": 1, "send": 2, "other": 0, "read": 1}, 0, 1, 2)),
        ((0.0, 1.0), 0.0, False, 16.0, Counted({"make": 1, "send": 2, "other": 0, "read": 1}, 0, 1, 2)),
        ((0.0, 0.0), 3.0, False, 17.0, Counted({"make": 1, "send": 2, "other": 0, "read": 1}, 1, 1, 2)),
        ((6.0, 0.0), 0.0, False, 32.0, Counted({"make": 0, "send": 0, "other": 0, "read": 1}, 0, 5, 0)),
        ((1.0, 0.0), 0.0, False, 15.0, Counted({"make": 1, "send": 2, "other": 0, "read": 1}, 0, 1, 2)),
        ((1.0, 0.0), 0.0, True, 16.0, Counted({"make": 1, "send": 2, "other": 0, "read": 1}, 0, 2, 1)),
    ],
    ids=["ops only", "handovers", "a credit", "a slow host", "a host that runs ahead", "a host that computes"],
)
def test_a_path_is_as_worked_out_by_hand(
    host: tuple[float, float], credit: float, host_computes: bool, end: float, counted: Counted
) -> None:
    """Two messages follow each other, and what reads them waits for both."""
    p = ProgramBuilder()
    x = p.compute("make", do_nothing, p.input("x"))
    with p.layer(0):
        first = p.comm("send", do_nothing, x)
    with p.layer(1):
        second = p.comm("send", do_nothing, x)
    p.compute("other", do_nothing)
    program = p.build(p.compute("read", do_nothing, first, second))
    layout = DurationLayout(program, 1)
    seconds = {"make": 4.0, "send": 4.0, "other": 3.0, "read": 2.0}
    durations = np.array([[*(seconds[name] for name in layout.names), credit, *host]])
    schedule = lower([program], sequential([program]))
    ends, paths = CriticalPaths(schedule, layout, host_computes).find(durations)
    assert ends.tolist() == [end]
    ops = {name: int(paths[0, layout.find_op(0, name)]) for name in layout.names}
    place = layout.find_credit(0, "send")
    found = Counted(ops, int(paths[0, place]), int(paths[0, layout.issue]), int(paths[0, layout.handover]))
    assert found == counted


def test_a_host_that_has_to_wait_for_the_start_of_an_op_issues_the_next_one_late() -> None:
    def find(host_sync: bool) -> tuple[float, list[float]]:
        p = ProgramBuilder()
        x = p.compute("make", do_nothing, p.input("x"))
        p.op("read_sizes", do_nothing, x, lane="comm", host_sync=host_sync)
        program = p.build(p.op("other", do_nothing, lane="side"))
        layout = DurationLayout(program, 1)
        schedule = lower([program], sequential([program]))
        ends, paths = CriticalPaths(schedule, layout).find(np.array([[4.0, 1.0, 9.0, 0.0, 2.0, 0.0]]))
        return float(ends[0]), paths[0].tolist()

    assert find(host_sync=False) == (2 + 2 + 2 + 9, [0, 0, 1, 0, 3, 0])
    assert find(host_sync=True) == (2 + 4 + 2 + 9, [1, 0, 1, 0, 2, 1])  # neither waits for its end


def test_each_different_path_is_listed_once() -> None:
    paths = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    assert sorted(list_different(paths).tolist()) == [[0.0, 2.0], [1.0, 0.0]]
