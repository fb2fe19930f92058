"""The validator of several ranks, held against a dry run that shares nothing with it but who belongs to which group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate_collectives
from dbo_runtime.lab.oracle.ranks import Groups, RankPlan, find_deadlock, validate_ranks
from dbo_runtime.lab.simulate.multi_rank_simulator import simulate_ranks
from dbo_runtime.observe.timeline import Timeline
from tests.support.mutants import BREAKING, HARMLESS
from tests.support.profiles import scale
from tests.support.rank_strategies import TWO_LANES, RankCase, rank_cases

EXAMPLES = max(100, scale(500))  # three times that for the first test, whose outcomes are counted
ENOUGH = EXAMPLES // 5  # of the common outcomes, or the tests would show little
FEW = EXAMPLES // 100  # of the rare ones


def get_refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except ScheduleError as error:
        return str(error)
    return ""


def get_validator_refusal(schedules: Sequence[Schedule], groups: Groups) -> str:
    return get_refusal(lambda: validate_ranks([RankPlan(schedule) for schedule in schedules], groups))


def get_simulator_refusal(case: RankCase) -> str:
    return get_refusal(lambda: simulate_ranks(case.schedules, case.cost, case.groups))


def test_schedules_are_accepted_exactly_if_the_dry_run_comes_to_its_end() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=3 * EXAMPLES)  # with twice as many, too few of one outcome were drawn once
    @given(rank_cases())
    def check(case: RankCase) -> None:
        refusal = get_validator_refusal(case.schedules, case.groups)
        assert bool(refusal) == bool(get_simulator_refusal(case)), refusal
        rule = re.match(r"rank \d+, rule (\d+), instruction \d+: ", refusal)
        seen[rule[1] if rule else "accepted"] += 1
        if (
            not refusal
            and len({tuple(instruction.issue for instruction in schedule.instructions) for schedule in case.schedules})
            > 1
        ):
            seen["accepted although orders differ"] += 1

    check()
    assert set(seen) == {"10", "12", "accepted", "accepted although orders differ"}
    assert min(seen["10"], seen["accepted"], seen["accepted although orders differ"]) >= ENOUGH, seen
    assert seen["12"] >= FEW, seen


def test_ranks_with_one_schedule_fit_together_exactly_if_its_collectives_are_on_one_lane() -> None:
    """So serving checks no more than that: every rank of a group has the same schedule."""
    seen: Counter[bool] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(st.one_of(rank_cases(), rank_cases(TWO_LANES)))
    def check(case: RankCase) -> None:
        for schedule in case.schedules:
            refusal = get_refusal(lambda: validate_collectives(schedule))  # noqa: B023 - called at once
            assert bool(refusal) == bool(get_validator_refusal([schedule] * 3, {})), refusal
            seen[bool(refusal)] += 1

    check()
    assert min(seen[True], seen[False]) >= ENOUGH, seen


def test_a_deadlock_is_found_exactly_if_the_dry_run_has_it_also_where_collectives_use_two_lanes() -> None:
    seen: Counter[bool] = Counter()

    @settings(max_examples=2 * EXAMPLES)  # one in thirty or more is a deadlock
    @given(rank_cases(TWO_LANES))
    def check(case: RankCase) -> None:
        assume(not meets_wrongly(case))
        stops = find_deadlock(case.schedules, case.groups)
        assert bool(stops) == bool(get_simulator_refusal(case)), stops
        seen[bool(stops)] += 1

    check()
    assert min(seen[True], seen[False]) >= FEW, seen


def test_no_mutant_that_is_accepted_hangs() -> None:
    seen: Counter[tuple[bool, bool]] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(rank_cases(), st.data())
    def check(case: RankCase, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(case.schedules) - 1))
        mutant = data.draw(st.sampled_from([*BREAKING, *HARMLESS]))(case.schedules[rank], data.draw)
        assume(mutant is not None)
        mutants = case._replace(schedules=(*case.schedules[:rank], mutant, *case.schedules[rank + 1 :]))
        is_refused = bool(get_validator_refusal(mutants.schedules, mutants.groups))
        hangs = bool(get_simulator_refusal(mutants))
        assert is_refused or not hangs
        seen[is_refused, hangs] += 1

    check()
    assert min(seen[True, True], seen[True, False], seen[False, False]) >= FEW, seen


@settings(max_examples=EXAMPLES // 3)
@given(rank_cases())
def test_the_dry_run_keeps_to_lanes_waits_hosts_and_meetings(case: RankCase) -> None:
    assume(not get_simulator_refusal(case))
    timelines = simulate_ranks(case.schedules, case.cost, case.groups)
    for rank, (schedule, timeline) in enumerate(zip(case.schedules, timelines, strict=True)):
        assert len(timeline.spans) == len(schedule.instructions)
        host = 0.0
        lane_ends: dict[str, float] = {}
        ends: dict[object, float] = {}
        for instruction, span in zip(schedule.instructions, timeline.spans, strict=True):
            assert f"{span.op}/{span.micro_batch}" == instruction.label
            bounds = [host, lane_ends.get(instruction.op.lane, 0.0), *(ends[issue] for issue in instruction.waits)]
            if instruction.op.communicator is None:
                assert span.start == max(bounds)
                assert span.end == span.start + case.cost(rank, instruction)
            else:
                assert span.start >= max(bounds)
                assert find_partners(case, timelines, rank, instruction.label) == {(span.start, span.end)}
            lane_ends[instruction.op.lane] = ends[instruction.issue] = span.end
            host = span.end if instruction.op.lane == "compute" or instruction.op.host_sync else host


def find_partners(case: RankCase, timelines: Sequence[Timeline], rank: int, label: str) -> set[tuple[float, float]]:
    """Return when those ran a collective that meet in it: all at once, or there is more than one answer."""
    (communicator,) = {
        instruction.op.communicator for instruction in case.schedules[rank].instructions if instruction.label == label
    }
    groups = case.groups.get(str(communicator), [range(len(timelines))])
    (members,) = (group for group in groups if rank in group)
    spans = (span for member in members for span in timelines[member].spans)
    return {(span.start, span.end) for span in spans if f"{span.op}/{span.micro_batch}" == label}


def meets_wrongly(case: RankCase) -> bool:
    """Whether members of a group run the collectives of a communicator in different orders."""
    for name in {instruction.op.communicator for instruction in case.schedules[0].instructions} - {None}:
        for group in case.groups.get(str(name), [range(len(case.schedules))]):
            runs = {
                tuple(
                    instruction.label
                    for instruction in case.schedules[rank].instructions
                    if instruction.op.communicator == name
                )
                for rank in group
            }
            if len(runs) > 1:
                return True
    return False
