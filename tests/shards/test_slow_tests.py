"""Each slow test, and each test inside vllm-ascend, is in one shard; a test that is slow is found without pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.shards.catalogue import Shard, Word, read_catalogue
from tools.shards.slow_tests import check_shards, is_within, list_files, list_tests

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def ranks(request): ...

@pytest.fixture
def engine(ranks): ...
"""
TESTS = """
MANY = [1, pytest.param(2, marks=pytest.mark.slow)]
slow = 3

def choose(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]

@pytest.mark.slow
def test_marked(): ...

@pytest.mark.parametrize("layers", MANY)
def test_named(layers): ...

@pytest.mark.parametrize("name", choose("ab"))
def test_chosen(name): ...

def test_fixture_of_a_fixture(engine): ...

@pytest.mark.parametrize(("engine", "size"), [(1, 2)])
def test_no_fixture_but_a_parameter_of_its_name(engine, size): ...

def test_fast(): print(slow, "slow")
"""
SLOW = ["test_marked", "test_named", "test_chosen", "test_fixture_of_a_fixture"]
FAST = ["test_no_fixture_but_a_parameter_of_its_name", "test_fast"]
FILE = "tests/layers/test_layers.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with slow tests of each kind."""
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / FILE).write_text(TESTS)
    return tmp_path


def name(tests: list[str]) -> list[str]:
    return [f"{FILE}::{test}" for test in tests]


def test_a_test_is_slow_by_its_own_mark_that_of_a_case_or_that_of_a_fixture(tree: Path) -> None:
    assert list_tests(tree, FILE, slow=True) == name(SLOW)
    assert list_tests(tree, FILE, slow=False) == name([*SLOW[1:], *FAST]), "some of their cases are not slow"


def test_all_tests_of_a_file_are_slow_by_the_mark_of_the_file(tree: Path) -> None:
    (tree / FILE).write_text(f"pytestmark = [pytest.mark.vllm, pytest.mark.slow]\n{TESTS}")
    assert len(list_tests(tree, FILE, slow=True)) == len(SLOW) + len(FAST)
    assert list_tests(tree, FILE, slow=False) == []


def make_shard(title: str, *tests: str) -> Shard:
    return Shard(title, Word("test-slow", "SLOW_TESTS"), tests, 1)


def test_a_slow_test_in_no_shard_or_in_two_is_said_to_be_so(tree: Path) -> None:
    assert check_shards(tree, [make_shard("all", FILE)]) == []
    lacking = check_shards(tree, [make_shard("some", *name(SLOW[1:]))])
    assert lacking == [f"{FILE}::test_marked is in no shard of test-slow: see tests/shards.json"]
    twice = check_shards(tree, [make_shard("all", FILE), make_shard("one", *name(SLOW[:1]))])
    assert twice == [f"{FILE}::test_marked is in all and one: see tests/shards.json"]


def test_what_a_shard_names_in_vain_is_said_to_be_so(tree: Path) -> None:
    shards = [make_shard("all", FILE), make_shard("none", *name(FAST[1:]), "tests/gone")]
    assert check_shards(tree, shards) == [
        f"none names {FILE}::test_fast, which has no test for test-slow",
        "none names tests/gone, which has no test for test-slow",
    ]


@pytest.mark.slow
def test_each_slow_test_here_and_each_inside_vllm_ascend_is_in_one_shard() -> None:
    assert check_shards(ROOT, read_catalogue(ROOT).shards) == []


@pytest.mark.slow
def test_pytest_finds_no_slow_test_that_is_not_found_here() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "-p", "no:cacheprovider"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    collected = {line.partition("[")[0] for line in out.splitlines() if line.startswith("tests/") and "::" in line}
    assert len(collected) > 100
    assert collected <= {test for file in list_files(ROOT) for test in list_tests(ROOT, file, slow=True)}
    assert not [test for test in collected if is_within(test, "tests/benchmarks")]
