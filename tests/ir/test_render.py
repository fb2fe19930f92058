from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import Policy, alternate, sequential, staggered
from dbo_runtime.ir.render import digest, parse, render
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.ir.validate import validate
from tests.support.programs import lower_toy, record_chain, record_three_lanes, record_toy

GOLDEN = Path(__file__).with_name("golden")
POLICIES: dict[str, Policy] = {"alternate": alternate, "staggered_1": partial(staggered, lead=1)}

CHAIN = record_chain(lambda x: x, lambda x: x)
ISSUES = [Issue(0, 0), Issue(0, 1), Issue(0, 2)]
TABLE = """\
   #  compute    comm
   0  make/0 *
   1             send/0 *  wait make/0
   2  receive/0            wait send/0  free %1/0"""


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_toys_schedule_is_the_one_on_file(policy: str, micro_batches: int) -> None:
    """A change that is meant: look at the difference, then replace the file's text by the new table."""
    golden = (GOLDEN / f"toy_{micro_batches}_{policy}.txt").read_text(encoding="utf-8")
    assert render(lower_toy(2, micro_batches, POLICIES[policy])) + "\n" == golden


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_a_schedule_on_file_is_read_back_safe(path: Path) -> None:
    micro_batches, policy = path.stem.removeprefix("toy_").split("_", maxsplit=1)
    program = record_toy(layers=2)
    schedule = parse(path.read_text(encoding="utf-8"), [program] * int(micro_batches))
    assert schedule == lower([program] * int(micro_batches), POLICIES[policy]([program] * int(micro_batches)))
    validate(schedule)


def test_rows_are_instructions_and_columns_are_lanes() -> None:
    assert render(lower([CHAIN], ISSUES)) == TABLE


def test_forks_and_joins_have_rows_of_their_own() -> None:
    schedule = replace(lower([CHAIN], ISSUES), forks=("comm",), joins=(Issue(0, 1), Issue(0, 0)))
    assert render(schedule).splitlines()[1] == "fork  comm"
    assert render(schedule).splitlines()[-1] == "join  send/0 make/0"
    assert parse(render(schedule), [CHAIN]) == schedule


def test_the_marked_row_is_pointed_at_and_the_mark_is_not_read() -> None:
    schedule = lower([CHAIN], ISSUES)
    assert render(schedule, mark=1).splitlines()[2].endswith("send/0 *  wait make/0   <-- here")
    assert parse(render(schedule, mark=1), [CHAIN]) == schedule


def test_only_rows_around_the_mark_are_shown() -> None:
    rows = render(lower_toy(), mark=10, around=2).splitlines()
    assert [row.split()[0] for row in rows] == ["#", "8", "9", "10", "11", "12"]


@pytest.mark.parametrize(
    ("row", "broken"),
    [
        ("   1             sent/0 *  wait make/0", "an op that is not there"),
        ("   1             send/1 *  wait make/0", "a micro-batch that is not there"),
        ("   1             send/0 *  wait made/0", "a wait for nothing"),
        ("   1             send/0 *  wait make/0  free %9/0", "a value that is not there"),
        ("   1             send/0 *  wait make/0  free %1/7", "a value of a micro-batch that is not there"),
        ("   1             send/0 *  wait make/0  free x/0", "a value without a number"),
        ("   1             send/0 make/0", "a second op in a row"),
        ("   1", "no op"),
        ("", "nothing"),
    ],
    ids=lambda text: text if not text.startswith(" ") else "",
)
def test_a_row_that_cannot_be_read_is_named(row: str, broken: str) -> None:
    rows = TABLE.splitlines()
    rows[2] = row
    with pytest.raises(ScheduleError) as raised:
        parse("\n".join(rows), [CHAIN])
    assert str(raised.value).startswith("line 3 of the schedule cannot be read")
    assert str(raised.value).endswith(repr(row))


def test_a_join_of_an_unknown_op_is_named() -> None:
    with pytest.raises(ScheduleError, match="line 5 of the schedule cannot be read"):
        parse(f"{TABLE}\njoin  gather/0", [CHAIN])


def test_a_fork_of_an_unknown_lane_is_refused() -> None:
    with pytest.raises(ScheduleError, match="forks aux, which no program has"):
        parse(f"{TABLE}\nfork  aux", [CHAIN])


def test_digests_agree_for_programs_recorded_separately_and_differ_between_policies() -> None:
    assert digest(lower_toy()) == digest(lower_toy())
    assert len({digest(lower_toy(policy=policy)) for policy in (sequential, *POLICIES.values())}) == 3


def test_digests_do_not_depend_on_the_process() -> None:
    """Ranks compare digests: no order of a set or dict of strings may show in them."""
    three = [record_three_lanes(3)] * 3
    code = (
        "from tests.support.programs import *; from dbo_runtime.ir.render import digest\n"
        "three = [record_three_lanes(3)] * 3; print(digest(lower(three, alternate(three))))"
    )
    root = str(Path(__file__).parents[2])
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == digest(lower(three, alternate(three)))
