"""Shards run by `make`, pass only if tests passed, and stand in the ledger with the commit on which they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.shards.__main__ import main
from tools.shards.history import COMMITS, History
from tools.shards.ledger import FILE, Entry, Ledger, read_ledger, write_ledger

SHARDS = {
    "budget_seconds": 100,
    "oldest_landings": 2,
    "inputs": ["constraints.txt"],
    "words": {"test-slow": {"variable": "SLOW_TESTS"}, "test-kit": {}},
    "shards": [
        {"name": "always", "word": "test-slow", "always": True, "seconds": 5, "tests": ["tests/test_always.py"]},
        {"name": "one", "word": "test-slow", "seconds": 60, "tests": ["tests/test_one.py"]},
        {"name": "two", "word": "test-slow", "seconds": 60, "tests": ["tests/test_two.py::test_a", "tests/test_one"]},
        {"name": "kit", "word": "test-kit", "seconds": 50, "tests": ["tests/test_kit.py"]},
    ],
}
# Says of each test that it is given that it passed, unless it is in the file `failing`.
MAKE = f"""#!{sys.executable}
import os, pathlib, sys
pathlib.Path("calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
failing = pathlib.Path("failing").read_text().split() if pathlib.Path("failing").is_file() else []
tests = " ".join(sys.argv[2:]).partition("=")[2].split() or ["tests/test_kit.py"]
with open(os.environ["TEST_DURATIONS"], "a") as file:
    for test in tests:
        name = test if "::" in test else test + "::test_it"
        print("1.5", 0 if test in failing else 2, name, file=file)
sys.exit(2 * ("status" in failing))
"""


def git(*words: str, folder: Path) -> str:
    settings = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, message: str = "Change") -> str:
    git("add", "--all", folder=folder)
    git("commit", "--allow-empty", "--quiet", "--message", message, folder=folder)
    return git("rev-parse", "HEAD", folder=folder)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small tree outside git, with a `make` that only notes what it is called with."""
    root, programs = tmp_path / "tree", tmp_path / "bin"
    programs.mkdir()
    (programs / "make").write_text(MAKE)
    (programs / "make").chmod(0o755)
    (root / "tests").mkdir(parents=True)
    (root / "tests" / "shards.json").write_text(json.dumps(SHARDS))
    for name in ("always", "one", "two", "kit"):
        (root / "tests" / f"test_{name}.py").touch()
    for name in ("constraints.txt", ".gitignore"):
        (root / name).write_text("calls\nfailing\n")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("TEST_DURATIONS", raising=False)
    return root


@pytest.fixture
def tree(bare: Path) -> Iterator[Path]:
    """Return the same in git."""
    git("init", "--quiet", folder=bare)
    commit(bare)
    return bare


def test_a_shard_that_passes_is_recorded_with_its_commit(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = git("rev-parse", "HEAD", folder=tree)
    assert main(["run", "one"], tree) == 0
    entry = read_ledger(tree).entries["one"]
    assert (entry.landing, entry.commit, entry.seconds, entry.passed) == (1, head, 2, 2)
    assert (tree / "calls").read_text() == "test-slow SLOW_TESTS=tests/test_one.py\n"
    assert read_ledger(tree).entries["kit"] == Entry(1)
    assert "shard one: 2 passed, 2 s on one core, recorded" in capsys.readouterr().out


def test_what_ran_is_added_to_the_file_of_the_run_it_is_part_of(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DURATIONS", str(tree / "calls"))
    assert main(["run", "kit"], tree) == 0
    assert (tree / "calls").read_text() == "test-kit\n1.5 2 tests/test_kit.py::test_it\n"


@pytest.mark.parametrize("failing", ["tests/test_one.py", "status"])
def test_a_shard_in_which_nothing_passes_fails(tree: Path, failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "failing").write_text(failing)
    assert main(["run", "one", "kit"], tree) == 1
    assert "one" not in {name for name, entry in read_ledger(tree).entries.items() if entry.commit}
    out = capsys.readouterr().out
    assert f"shards: failed: {'one, kit' if failing == 'status' else 'one'}" in out


def test_each_entry_of_a_shard_must_have_a_test_that_passes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "failing").write_text("tests/test_two.py::test_a")
    assert main(["run", "two"], tree) == 1
    assert "FAILED, no test ran and passed in tests/test_two.py::test_a;" in capsys.readouterr().out


def test_what_is_not_committed_is_not_recorded(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests" / "test_one.py").write_text("# changed\n")
    assert main(["run", "one", "kit"], tree) == 0
    assert "not recorded: commit first: tests/test_one.py" in capsys.readouterr().out
    assert [name for name, entry in read_ledger(tree).entries.items() if entry.commit] == ["kit"]


def test_without_git_shards_are_planned_and_run_but_not_recorded(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run"], bare) == 0
    out = capsys.readouterr().out
    assert "there is no git history here" in out
    assert "not recorded: git knows no commit here" in out
    assert not (bare / FILE).exists()


def test_a_plan_runs_shards_of_one_word_together_within_the_budget(tree: Path) -> None:
    assert main(["run"], tree) == 0
    calls = (tree / "calls").read_text().splitlines()
    assert calls[0].startswith("test-slow SLOW_TESTS=tests/test_always.py")
    assert len({*calls}) == len(calls)
    recorded = {name for name, entry in read_ledger(tree).entries.items() if entry.commit}
    assert "always" in recorded
    assert len(recorded - {"always"}) == 1, "two others cost more than the budget"


def test_all_shards_run_one_by_one(tree: Path) -> None:
    assert main(["run", "--all"], tree) == 0
    assert len((tree / "calls").read_text().splitlines()) == len(SHARDS["shards"])


def test_a_landing_is_a_commit_of_the_ledger(tree: Path) -> None:
    main(["run", "one"], tree)
    main(["run", "two"], tree)
    assert read_ledger(tree).landing == 1, "both are part of what is committed next"
    commit(tree, "Record")
    main(["run", "two"], tree)
    assert {name: read_ledger(tree).get(name).landing for name in ("one", "two")} == {"one": 1, "two": 2}


def test_commits_without_a_record_make_shards_older(tree: Path) -> None:
    main(["run", "--all"], tree)
    commit(tree, "Record")
    stream = "".join(f"commit refs/heads/other\ncommitter A <a@a> {n} +0000\ndata 1\nx\n" for n in range(COMMITS))
    head = git("rev-parse", "HEAD", folder=tree)
    first = stream.replace("data 1\nx\n", f"data 1\nx\nfrom {head}\n", 1)
    subprocess.run(["git", "fast-import", "--quiet"], input=first, text=True, cwd=tree, check=True)
    assert History(tree).count_unrecorded() == 0
    git("checkout", "--quiet", "other", folder=tree)
    assert History(tree).count_unrecorded() == 1


def test_a_plan_fails_where_a_shard_is_too_old(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tree, Ledger(5, {"always": Entry(0), "one": Entry(2), "two": Entry(3), "kit": Entry(5)}))
    assert main(["plan"], tree) == 1
    assert "FAILED: one passed last 3 landings ago, 2 are allowed" in capsys.readouterr().out
    write_ledger(tree, read_ledger(tree).record("one", Entry(3)))
    assert main(["plan"], tree) == 0


def test_a_plan_is_the_same_in_a_shallow_clone(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "one", "kit"], tree)
    commit(tree, "Record")
    (tree / "tests" / "test_one.py").write_text("# changed\n")
    commit(tree)
    git("clone", "--quiet", "--depth=1", f"file://{tree}", str(tmp_path / "clone"), folder=tmp_path)
    capsys.readouterr()
    assert main(["plan"], tree) == 0
    whole = capsys.readouterr().out
    assert ", changed since: tests/test_one.py" in whole
    assert main(["plan"], tmp_path / "clone") == 0
    note, *shallow = capsys.readouterr().out.splitlines()
    assert "this clone is shallow" in note
    assert shallow == whole.replace(", changed since: tests/test_one.py", "").splitlines()


def test_a_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    ledger = Ledger(3, {"a": Entry(1), "b": Entry(3, "abc", "2026-01-31", 40, 7, "digest")})
    write_ledger(tmp_path, ledger)
    assert read_ledger(tmp_path) == ledger
    assert read_ledger(tmp_path / "nowhere") == Ledger()


def test_shards_that_are_no_more_leave_the_ledger_and_new_ones_count_from_now() -> None:
    ledger = Ledger(3, {"gone": Entry(1), "kept": Entry(2)}).keep(["kept", "new"])
    assert ledger.entries == {"kept": Entry(2), "new": Entry(3)}
