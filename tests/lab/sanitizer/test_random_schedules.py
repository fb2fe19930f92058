"""The sanitizer refuses to run a changed schedule if, and only if, the oracle finds it unsafe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.errors import DeviceError, SanitizerError
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.lab.sanitizer.executor import SanitizedExecutor
from tests.support.mutants import BREAKING, Mutation
from tests.support.oracle import find_violations
from tests.support.profiles import scale
from tests.support.strategies import Case, cases, make_inputs

EXAMPLES = max(20, scale(100))
ENOUGH = EXAMPLES // 10


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def find_refusal(device: CpuDevice, schedule: Schedule, case: Case) -> type[Exception] | None:
    """Return the type of what running a schedule raises: programs and instructions that differ fail in many ways."""
    try:
        run(device, schedule, case)
    except Exception as error:  # noqa: BLE001 - any refusal will do
        return type(error)
    return None


def run(device: CpuDevice, schedule: Schedule, case: Case) -> object:
    return SanitizedExecutor(schedule, device, EventTable(device)).run(make_inputs(case))


@settings(max_examples=2 * EXAMPLES)
@given(case=cases())
def test_what_is_safe_runs_and_gives_the_results_of_the_sequential_loop(device: CpuDevice, case: Case) -> None:
    assert run(device, case.lower(), case) == run_sequential(case.programs, make_inputs(case))


@pytest.mark.parametrize("mutation", BREAKING, ids=lambda mutation: mutation.__name__)
def test_a_mutant_is_refused_while_it_runs_exactly_if_it_is_unsafe(device: CpuDevice, mutation: Mutation) -> None:
    seen: Counter[type[Exception] | None] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(cases(), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        mutant = mutation(case.lower(), data.draw)
        assume(mutant is not None)
        refusal = find_refusal(device, mutant, case)
        violations = find_violations(mutant)
        assert bool(refusal) == bool(violations), (refusal, violations)
        seen[refusal] += 1

    check()
    assert seen[SanitizerError] + seen[DeviceError] >= ENOUGH, seen
