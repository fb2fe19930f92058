"""Every fault planted on any one rank is refused, with that rank and an instruction in the message."""

from __future__ import annotations

import re

import pytest

from dbo_runtime.errors import ScheduleError
from dbo_runtime.lab.oracle.ranks import validate_ranks
from dbo_runtime.lab.simulate.multi_rank_simulator import simulate_ranks
from tests.support.rank_mutants import FAULTS, GROUPS, Fault, make_plans, plant

RANKS = range(4)
HARMLESS_TO_THE_DRY_RUN = {2, 4, 5, 7, 8, 9, 11}  # rules against races, risks and wrong sizes: no rank waits for ever


def test_without_a_fault_the_plans_are_accepted_and_run() -> None:
    plans = make_plans()
    validate_ranks(plans, GROUPS)
    simulate_ranks([plan.schedule for plan in plans], lambda rank, instruction: 1.0, GROUPS)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_on_one_rank_is_refused_with_rank_and_instruction(fault: Fault, rank: int) -> None:
    broken = set()
    for plans in plant(fault, rank, make_plans()):
        with pytest.raises(ScheduleError) as raised:
            validate_ranks(plans, GROUPS)
        head, table = str(raised.value).split("\n\n")
        named = re.match(r"rank (\d), rule (\d+), instruction (\d+): (.*)", head)
        assert named is not None, head
        instruction = plans[int(named[1])].schedule.instructions[int(named[3])]
        assert re.search(rf"\brank {rank}\b", head)
        assert f"({instruction.op.declared_at})" in head
        assert int(named[2]) < 9 or named[4].startswith(instruction.label)
        (marked,) = (row for row in table.splitlines() if row.endswith("<-- here"))
        assert marked.split()[:2] == [named[3], instruction.label]
        broken.add(int(named[2]))
    assert broken == FAULTS[fault]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_dry_run_refuses_the_faults_that_hang(fault: Fault, rank: int) -> None:
    for plans in plant(fault, rank, make_plans()):
        if not FAULTS[fault] & HARMLESS_TO_THE_DRY_RUN:
            with pytest.raises(ScheduleError, match=rf"\brank {rank}\b"):
                simulate_ranks([plan.schedule for plan in plans], lambda rank, instruction: 1.0, GROUPS)
