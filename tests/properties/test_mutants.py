"""The validator refuses a changed schedule if, and only if, the oracle finds it unsafe."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate
from tests.support.allocator import find_stolen_blocks
from tests.support.mutants import BREAKING, HARMLESS, Mutation
from tests.support.oracle import find_violations
from tests.support.profiles import scale
from tests.support.strategies import Case, cases

EXAMPLES = max(20, scale(100))
ENOUGH = EXAMPLES // 10  # unsafe ones among them, or the test would show little


def get_refusal(schedule: Schedule) -> str:
    try:
        validate(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mutation", BREAKING, ids=lambda mutation: mutation.__name__)
def test_a_mutant_is_refused_exactly_if_it_is_unsafe(mutation: Mutation) -> None:
    seen: Counter[bool] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(cases(), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        mutant = mutation(case.lower(), data.draw)
        assume(mutant is not None)
        mismatches = find_violations(mutant)
        refusal = get_refusal(mutant)
        assert bool(refusal) == bool(mismatches), mismatches
        if refusal:
            assert re.match(r"rule [1-8], instruction \d+: ", refusal)
            assert "<-- here" in refusal
        seen[bool(mismatches)] += 1

    check()
    assert seen[True] >= ENOUGH, seen


@pytest.mark.parametrize("mutation", HARMLESS, ids=lambda mutation: mutation.__name__)
@settings(max_examples=EXAMPLES)
@given(cases(), st.data())
def test_a_harmless_change_is_accepted(mutation: Mutation, case: Case, data: st.DataObject) -> None:
    mutant = mutation(case.lower(), data.draw)
    assume(mutant is not None)
    assert not find_violations(mutant)
    validate(mutant)


@pytest.mark.parametrize("results_alias", [False, True])
@settings(max_examples=4 * EXAMPLES)
@given(cases(), st.data())
def test_no_mutant_that_is_accepted_hands_out_memory_in_use(
    results_alias: bool, case: Case, data: st.DataObject
) -> None:
    mutant = data.draw(st.sampled_from(BREAKING))(case.lower(), data.draw)
    assume(mutant is not None)
    with suppress(ScheduleError):
        validate(mutant)
        assert not find_stolen_blocks(mutant, results_alias)
