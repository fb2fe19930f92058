"""The generated function does what the plain loop does: the same calls in the same order, results, frees and errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.devices import DirectCalls, Task, Values
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.errors import get_context
from dbo_runtime.ir.codegen import Issuing
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from tests.support.profiles import scale
from tests.support.strategies import LANES, Case, cases, make_inputs

EXAMPLES = scale(300)


class Cell(list[int]):
    """A value whose end can be seen."""


class Journal:
    """What was called, and at each op which values were alive: those that were made, by number."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._cells: list[weakref.ref[Cell]] = []
        self._calls = 0

    def note(self, line: str) -> None:
        self.lines.append(line)

    def trace(self, result: Any) -> Any:
        """Return a result made of cells: those that are new to an op are given a number each."""
        if isinstance(result, tuple):
            return tuple(map(self.trace, result))
        if isinstance(result, Cell):
            return result
        cell = Cell(result)
        self._cells.append(weakref.ref(cell))
        return cell

    def record(self, op: Op, failing: int | None) -> Op:
        """Return an op that notes each call. The call number *failing* is given too few values to unpack."""

        def call(*cells: Cell) -> Any:
            alive = [number for number, cell in enumerate(self._cells) if cell() is not None]
            self.note(f"{op.label}({', '.join(map(str, cells))}), alive {alive}")
            self._calls += 1
            if self._calls == failing:
                if len(op.writes) > 1:
                    return op.fn(*cells)[1:]
                raise FloatingPointError(op.label)
            return self.trace(op.fn(*cells))

        return replace(op, fn=call)


class JournalLane:
    """A lane of which everything is noted."""

    def __init__(self, name: str, issuing: Issuing, device: JournalDevice) -> None:
        self.name = name
        self._issuing = issuing
        self._device = device

    def launch(self, task: Task, values: Values) -> None:
        if self._issuing is Issuing.SWITCHED:
            self._switch()
        task(values)

    def measure(self, task: Task, values: Values, note: object) -> None:
        raise AssertionError("nothing is measured")

    def record(self, event: int) -> None:
        self._device.journal.note(f"{self.name} records {event}")

    def wait(self, event: int) -> None:
        self._device.journal.note(f"{self.name} waits for {event}")

    def get_direct_calls(self) -> DirectCalls | None:
        if self._issuing is Issuing.LAUNCHED:
            return None
        return DirectCalls(self._switch if self._issuing is Issuing.SWITCHED else None, self.record, self.wait)

    def _switch(self) -> None:
        if self._device.current != self.name:
            self._device.current = self.name
            self._device.journal.note(f"switch to {self.name}")


class JournalDevice:
    """A device on which nothing runs concurrently, with lanes of each kind."""

    name = "journal"
    is_capturing = False

    def __init__(self, journal: Journal, issuing: Mapping[str, Issuing]) -> None:
        self.journal = journal
        self.current = ""
        self._issuing = issuing
        self._events = 0

    def open_lanes(self, names: Sequence[str]) -> list[JournalLane]:
        return [JournalLane(name, self._issuing[name], self) for name in names]

    def make_event(self) -> int:
        self._events += 1
        return self._events

    def begin(self) -> None:
        self.current = LANES[0]
        self.journal.note("begin")

    def release_to_caller(self, values: Iterable[Any]) -> None:
        self.journal.note(f"release {list(values)}")

    def finish(self) -> None:
        self.journal.note("finish")

    def abort(self) -> None:
        self.journal.note("abort")


def run(kind: type[Executor], case: Case, issuing: Mapping[str, Issuing], failing: int | None) -> list[str]:
    """Return the journal of one run, with its results or its error at the end."""
    journal = Journal()
    device: Any = JournalDevice(journal, issuing)
    schedule = with_ops(case, lambda op: journal.record(op, failing)).lower()
    inputs = [tuple(map(journal.trace, given)) for given in make_inputs(case)]
    try:
        outputs = kind(schedule, device, EventTable(device)).run(inputs, lambda mb: journal.note(f"enter {mb}"))
    except Exception as error:  # noqa: BLE001 - whatever it is, both must raise it
        journal.note(f"{error!r}: {get_context(error)}")
    else:
        journal.note(str(outputs))
    return journal.lines


def with_ops(case: Case, change: Callable[[Op], Op]) -> Case:
    """Return the case with other ops; micro-batches that have a program in common still do."""
    changed: dict[int, Program] = {}
    for program in case.programs:
        if id(program) not in changed:
            changed[id(program)] = replace(program, ops=tuple(map(change, program.ops)))
    return Case(tuple(changed[id(program)] for program in case.programs), case.order)


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_generated_function_makes_the_calls_of_the_plain_loop(is_failing: bool) -> None:
    @settings(max_examples=EXAMPLES)
    @given(cases(), st.fixed_dictionaries({lane: st.sampled_from(Issuing) for lane in LANES}), st.integers(1, 12))
    def check(case: Case, issuing: Mapping[str, Issuing], failing: int) -> None:
        expected = run(Executor, case, issuing, failing if is_failing else None)
        assert run(GeneratedExecutor, case, issuing, failing if is_failing else None) == expected

    check()


def test_with_threads_the_generated_function_computes_what_the_sequential_loop_computes() -> None:
    device = CpuDevice()

    @settings(max_examples=EXAMPLES)
    @given(cases())
    def check(case: Case) -> None:
        executor = GeneratedExecutor(case.lower(), device, EventTable(device))
        assert executor.run(make_inputs(case)) == run_sequential(case.programs, make_inputs(case))

    check()
    device.close()
