"""The plan of CI depends on content alone, prefers what is touched, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.shards.catalogue import Catalogue, Shard, ShardsError, Word, check_names, read_catalogue
from tools.shards.history import History
from tools.shards.ledger import Entry
from tools.shards.plan import Plan, Standing, make_plan
from tools.shards.report import describe_outcome, describe_plan
from tools.shards.runner import Outcome, Ran

ROOT = Path(__file__).resolve().parents[2]
WORD = Word("test-slow", "SLOW_TESTS")
OLDEST = 10


def stand(
    name: str,
    age: int,
    touched: bool = False,
    seconds: int = 100,
    always: bool = False,
    set_up: int = 0,
    measured: int | None = None,
) -> Standing:
    shard = Shard(name, WORD, (f"tests/test_{name}.py",), seconds, set_up, always)
    entry = Entry(50 - age, "c" * 40, "2026-01-31", measured, 3, "before" if touched else name)
    return Standing(shard, entry, age, name, ("a.py", "b.py", "c.py", "d.py") if touched else ())


def list_names(standings: Sequence[Standing]) -> list[str]:
    return [each.shard.name for each in standings]


def test_touched_shards_come_first_and_the_stalest_of_them_before_others() -> None:
    standings = [stand("a", 9), stand("b", 1, touched=True), stand("c", 5), stand("d", 3, touched=True)]
    plan = make_plan(standings, 300, OLDEST)
    assert (list_names(plan.touched), list_names(plan.stalest)) == (["d", "b"], ["a"])
    assert (list_names(plan.left), list_names(plan.rest)) == ([], ["c"])
    assert [shard.name for shard in plan.list_shards()] == ["d", "b", "a"]


def test_touched_shards_without_room_are_left_and_smaller_ones_take_their_place() -> None:
    standings = [stand("large", 4, touched=True, seconds=250), stand("a", 3, touched=True), stand("b", 2, seconds=90)]
    plan = make_plan(standings, 200, OLDEST)
    assert (list_names(plan.touched), list_names(plan.left)) == (["a"], ["large"])
    assert list_names(plan.stalest) == ["b"]


def test_what_always_runs_costs_nothing_of_the_budget_and_is_never_too_old() -> None:
    plan = make_plan([stand("always", 99, always=True, seconds=1000), stand("a", 1)], 100, OLDEST)
    assert (list_names(plan.always), list_names(plan.stalest), plan.too_old) == (["always"], ["a"], ())


@pytest.mark.parametrize(("age", "too_old"), [(10, False), (11, True)])
def test_a_shard_may_not_go_without_passing_for_longer_than_allowed(age: int, too_old: bool) -> None:
    assert bool(make_plan([stand("a", age)], 0, OLDEST).too_old) == too_old


def test_a_measured_cost_replaces_the_estimate_but_not_the_set_up() -> None:
    assert stand("a", 1, seconds=100, set_up=40).seconds == 140
    assert stand("a", 1, seconds=100, set_up=40, measured=7).seconds == 47


def test_the_order_of_shards_in_the_file_does_not_matter_and_inputs_decide_between_those_of_one_age() -> None:
    standings = [stand(name, 2) for name in "cab"]
    plans = [make_plan(each, 200, OLDEST) for each in (standings, standings[::-1])]
    assert [list_names(plan.stalest) for plan in plans] == [["a", "b"], ["a", "b"]]


def describe(plan: Plan, tmp_path: Path) -> list[str]:
    return list(describe_plan(plan, Catalogue((), 200, OLDEST), History(tmp_path)))


def test_a_plan_says_what_it_runs_and_why_and_what_it_leaves_out(tmp_path: Path) -> None:
    standings = [stand("a", 1, touched=True), stand("b", 12, touched=True, seconds=201), stand("c", 1), stand("d", 0)]
    lines = describe(make_plan(standings, 200, OLDEST), tmp_path)
    assert lines[0].startswith("shards: there is no git history here")
    assert "touched: a, passed 1 landing ago on ccccccccc, 100 s, changed since: a.py, b.py, c.py and 1 more" in lines
    assert "among the stalest: c, passed 1 landing ago on ccccccccc, 100 s" in lines
    assert "touched, but left for the next run: b (12)" in lines
    assert "unchanged since they passed, and not run: d (0)" in lines
    assert lines[-1].startswith("FAILED: b passed last 12 landings ago, 10 are allowed: make test-shards SHARDS")


def test_a_shard_that_was_never_recorded_is_said_to_be_so(tmp_path: Path) -> None:
    shard = Shard("new", WORD, ("tests/test_new.py",), 60)
    lines = describe(make_plan([Standing(shard, Entry(3), 2, "now")], 100, OLDEST), tmp_path)
    assert "touched: new, named 2 landings ago and never recorded, about 60 s" in lines


def test_an_outcome_says_whether_it_is_recorded() -> None:
    passed = Outcome(stand("a", 0).shard, Ran(12.4, 3), None)
    assert describe_outcome(passed, None) == "shard a: 3 passed, 12 s on one core, recorded"
    assert describe_outcome(passed, "commit first: a.py").endswith("not recorded: commit first: a.py")
    failed = Outcome(passed.shard, passed.ran, "make ended with 2")
    assert describe_outcome(failed, None).startswith("shard a: FAILED, make ended with 2")


def test_names_are_those_of_one_shard_each_and_shards_have_tests() -> None:
    shard = stand("a", 0).shard
    with pytest.raises(ShardsError, match="names these twice: a"):
        check_names([shard, shard])
    with pytest.raises(ShardsError, match="shards without tests: empty"):
        check_names([Shard("empty", WORD, (), 1)])


def test_a_name_that_no_shard_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ShardsError, match=r"no shard is called nothing: .*families"):
        read_catalogue(ROOT).get("nothing")


def test_any_shard_but_those_that_always_run_fits_into_the_budget() -> None:
    """Or CI would never run it, and only fail when it is too old. An environment of its own may take longer."""
    catalogue = read_catalogue(ROOT)
    assert not [each.name for each in catalogue.shards if not each.always and each.seconds > catalogue.budget]
