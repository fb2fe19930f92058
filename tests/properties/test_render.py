"""Rendering loses nothing, and the digest tells schedules apart."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.render import digest, parse, render
from tests.support.mutants import add_fork, add_record, move_free, remove_free, remove_wait, swap_neighbours
from tests.support.profiles import scale
from tests.support.strategies import Case, cases, orders


@settings(max_examples=scale(200))
@given(cases(), st.data())
def test_a_rendered_schedule_is_read_back_as_it_was(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    mark = data.draw(st.none() | st.sampled_from(range(len(schedule.instructions))))
    assert parse(render(schedule, mark), case.programs) == schedule


@settings(max_examples=scale(200))
@given(cases(), st.data())
def test_the_digest_is_that_of_the_schedule_and_of_no_other(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    other = lower(case.programs, data.draw(orders(case.programs)))
    assert (digest(other) == digest(schedule)) == (other == schedule)


@settings(max_examples=scale(200))
@given(cases(), st.data())
def test_the_digest_sees_every_change(case: Case, data: st.DataObject) -> None:
    mutations = [add_fork, add_record, move_free, remove_free, remove_wait, swap_neighbours]
    schedule = case.lower()
    changed = data.draw(st.sampled_from(mutations))(schedule, data.draw)
    assume(changed not in (None, schedule))
    assert digest(changed) != digest(schedule)
