"""The tool that tries mutants (`make mutants`): which ones it makes, which tests it runs, and what it says of them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants.__main__ import list_all
from tools.mutants.equivalents import Equivalent, describe_stale, read_equivalents
from tools.mutants.finder import ROOT
from tools.mutants.mutations import apply_mutation, list_mutations, take_sample
from tools.mutants.report import Score, Trial, count, describe, list_rows
from tools.mutants.server import HUNG, KILLED, SURVIVED, Order, Verdict
from tools.mutants.targets import TARGETS

SOURCE = '''
"""A module."""

LIMIT = 10


def clamp(number: int) -> int:
    """Return the number, or the limit."""
    if number > LIMIT:
        return LIMIT
    return number


def count_down(number: int) -> int:
    while number > 0:
        number -= 1
    return number


def forget(number: int) -> int:
    return number * 2
'''
TESTS = """
import subprocess
import sys

import tiny


def test_clamp():
    assert [tiny.clamp(number) for number in (9, 10, 11)] == [9, 10, 10]


def test_count_down():
    assert tiny.count_down(3) == 0


def test_forget_elsewhere():
    subprocess.run([sys.executable, "-c", "import tiny; assert tiny.forget(3) == 6"], check=True)
"""


ORDERED_TESTS = """
import time

import tiny


def test_slow():
    time.sleep(0.5)
    tiny.begun = True


def test_quick():
    assert tiny.begun
"""
SETTINGS = "[pytest]\npythonpath = .\nmarkers =\n  slow\n  vllm\n  root\n"


def list_changes(source: str) -> list[str]:
    return [mutation.change for mutation in list_mutations(source)]


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("a = b < c", ["b < c -> b <= c"]),
        ("a = b < c <= d", ["b < c <= d -> b <= c <= d", "b < c <= d -> b < c < d"]),
        ("a = not b", ["not b -> b"]),
        ("a = b and c", ["b and c -> b or c"]),
        ("a = b + c // d", ["b + c // d -> b - c // d", "c // d -> c / d"]),
        ("a = f(3, 0.5, True, 'text', None)", ["3 -> 4", "0.5 -> 1.0", "True -> False"]),
        ("a = min(b)", ["min(b) -> max(b)"]),
        ("a = f(b, c=d)", ["f(b, c=d) -> f(b)"]),
        ("a = zip(b, c, strict=True)", []),
        ("a = 'b', 'c'", ["('b', 'c') -> ('c',)", "('b', 'c') -> ('b',)"]),
        ("a = b[c:]", ["[c:] -> [:]"]),
        ("a = [b for b in c if b]", ["for b in c if b -> for b in c"]),
        ("a += b", ["a += b -> a -= b", "a += b -> pass"]),
        ("a.b = c", ["assign -> pass"]),
        ("if a: f(b)", ["if a -> if not a", "expr -> pass"]),
        ("for a in b: break", ["break -> continue"]),
        ("def f(): return a", ["return value -> return None"]),
        ("def f(): return False", ["False -> True"]),
        ("def f(): raise Error('no')", ["raise -> pass"]),
    ],
)
def test_a_mutant_has_one_small_mistake(source: str, changes: list[str]) -> None:
    assert list_changes(source) == changes


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "def f(a: b | c = d) -> e | None: '''Text.'''",
        "a: b[1] = c",
        "assert a > 1",
        "log.info('text', a=1 + 1)",
        "a = f'{b + 1}'",
        "__all__ = ['a', 'b']",
        "T = TypeVar('T', bound=a)",
        "if TYPE_CHECKING: import a",
    ],
)
def test_what_is_said_and_not_done_is_left_as_it_is(source: str) -> None:
    assert list_changes(source) == []


def test_each_mutant_differs_from_the_module_and_from_each_other() -> None:
    mutants = [ast.unparse(apply_mutation(SOURCE, mutation)) for mutation in list_mutations(SOURCE)]
    assert len({*mutants, ast.unparse(ast.parse(SOURCE))}) == len(mutants) + 1


def test_a_sample_stays_when_lines_move_and_changes_with_the_seed() -> None:
    source = (ROOT / "dbo_runtime" / "ir" / "validate.py").read_text()
    sample = take_sample(list_mutations(source), 20, seed=0)
    moved = take_sample(list_mutations("import this\n\n" + source), 20, seed=0)
    assert [mutation.key for mutation in moved] == [mutation.key for mutation in sample]
    assert [mutation.key for mutation in take_sample(list_mutations(source), 20, seed=1)] != [
        mutation.key for mutation in sample
    ]


@pytest.mark.slow
def test_tests_kill_what_they_notice(tmp_path: Path) -> None:
    """Here, and in processes that they start; what hangs is ended, and what makes no difference survives."""
    (tmp_path / "tiny.py").write_text(SOURCE)
    (tmp_path / "test_tiny.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    expected = {
        "number > LIMIT -> number >= LIMIT": (SURVIVED, None),
        "10 -> 11": (KILLED, "test_tiny.py::test_clamp"),
        "number > 0 -> number >= 0": (KILLED, "test_tiny.py::test_count_down"),
        "number -= 1 -> pass": (HUNG, None),
        "number * 2 -> number / 2": (KILLED, "test_tiny.py::test_forget_elsewhere"),
    }
    chosen = [mutation for mutation in list_mutations(SOURCE) if mutation.change in expected]
    order = Order(str(tmp_path), "tiny", ["test_tiny.py"], chosen, slack=3.0)
    verdicts = [Verdict(*json.loads(line)) for line in run_server(order).stdout.splitlines()]
    found = {one.change: verdict[:2] for one, verdict in zip(chosen, verdicts, strict=True)}
    assert found == expected


@pytest.mark.slow
def test_tests_that_depend_on_their_order_say_nothing_of_a_mutant(tmp_path: Path) -> None:
    """They would fail whatever the mutant does, because quick ones run before slow ones."""
    (tmp_path / "tiny.py").write_text(SOURCE)
    (tmp_path / "test_tiny.py").write_text(ORDERED_TESTS)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    ran = run_server(Order(str(tmp_path), "tiny", ["test_tiny.py"], list_mutations(SOURCE)))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "test_tiny.py::test_quick fails in another order" in ran.stderr


def run_server(order: Order) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.mutants.server"],
        input=json.dumps(order._asdict()),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_scores_leave_equivalent_mutants_out_and_a_killed_one_is_not_equivalent() -> None:
    one = list_mutations(SOURCE)[0]
    killed, survived, listed, wrong = (
        Trial(one, Verdict(outcome, None, 0.0), is_listed)
        for outcome, is_listed in ((HUNG, False), (SURVIVED, False), (SURVIVED, True), (KILLED, True))
    )
    assert count([killed, survived, listed]) == Score(3, 1, 1, 1)
    assert count([killed, survived, listed]).share == 0.5
    assert [describe(trial) is None for trial in (killed, survived, listed, wrong)] == [True, False, True, False]
    assert wrong.is_wrongly_listed


def test_an_entry_of_the_list_is_stale_when_its_line_is_gone() -> None:
    mutations = {"tiny": list_mutations(SOURCE)}
    entry = Equivalent(*mutations["tiny"][0].key, "a reason")
    assert describe_stale({"tiny": [entry]}, mutations) == []
    assert describe_stale({"tiny": [entry._replace(line="gone")]}, mutations) == [
        "tiny: no mutation  | gone | 10 -> 11",
    ]
    assert describe_stale({"tinier": [entry]}, mutations) == ["tinier: no such module is mutated"]


def test_the_list_is_not_stale_and_says_why() -> None:
    listed = read_equivalents()
    assert describe_stale(listed, list_all()) == []
    assert all(entry.reason.endswith(".") for entries in listed.values() for entry in entries)


def test_every_module_has_tests() -> None:
    assert [file for files in TARGETS.values() for file in files if not (ROOT / "tests" / file).exists()] == []


def test_rows_are_of_each_module_and_of_all() -> None:
    rows = list_rows({"b": Score(20, 18, 0, 2), "c": Score(2, 1, 0, 0)})
    assert rows == [("b", 20, 18, 0, 2, "100%"), ("c", 2, 1, 0, 0, "50%"), ("all", 22, 19, 0, 2, "95%")]
    assert list_rows({}) == [("all", 0, 0, 0, 0, "100%")]
