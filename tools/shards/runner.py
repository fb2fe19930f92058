"""Run shards by `make`, and count what each of them ran."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Shard, is_within

DURATIONS = "TEST_DURATIONS"  # names the file to which each run of pytest adds its tests; see tests/session_report.py


@dataclass(frozen=True)
class Ran:
    """What came of some of the tests: of one without its parameters, or of a shard."""

    seconds: float
    passed: int


@dataclass(frozen=True)
class Outcome:
    """What came of a shard."""

    shard: Shard
    ran: Ran
    complaint: str | None
    """Why it did not pass, if it did not."""


def run_shards(root: Path, shards: Sequence[Shard], together: bool) -> Iterator[Outcome]:
    """Run shards, and yield what came of each.

    Together, those of one word of `make` are one call, which keeps both cores busy; if it fails, all of them failed.
    """
    calls = group_by_word(shards) if together else [[shard] for shard in shards]
    for call in calls:
        tests: dict[str, Ran] = {}
        status = call_make(root, call, tests)
        yield from (judge(shard, tests, status) for shard in call)


def group_by_word(shards: Iterable[Shard]) -> list[list[Shard]]:
    """Return the shards that one call of `make` can run; a word that chooses its tests itself runs alone."""
    groups: dict[str, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.word.text if shard.word.variable else shard.name, []).append(shard)
    return list(groups.values())


def call_make(root: Path, shards: Sequence[Shard], tests: dict[str, Ran]) -> int:
    """Call `make` for shards of one word; put what ran into *tests*, and return the exit status."""
    command = write_command(shards)
    print(f"shards {' '.join(shard.name for shard in shards)}: {' '.join(command)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        durations = Path(folder) / "durations"
        durations.touch()
        status = subprocess.run(
            command, cwd=root, env={**os.environ, DURATIONS: str(durations)}, check=False
        ).returncode
        text = durations.read_text()
    if DURATIONS in os.environ:
        with Path(os.environ[DURATIONS]).open("a") as file:
            file.write(text)
    tests.update(read_tests(text))
    return status


def write_command(shards: Sequence[Shard]) -> list[str]:
    """Return the call of `make` that runs shards of one word."""
    word = shards[0].word
    chosen = " ".join(dict.fromkeys(test for shard in shards for test in shard.tests))
    return ["make", *word.text.split(), *([f"{word.variable}={chosen}"] if word.variable else [])]


def read_tests(text: str) -> dict[str, Ran]:
    """Return what ran, by test without its parameters."""
    tests: dict[str, Ran] = {}
    for line in text.splitlines():
        seconds, passed, test = line.split(maxsplit=2)
        before = tests.get(test, Ran(0.0, 0))
        tests[test] = Ran(before.seconds + float(seconds), before.passed + int(passed))
    return tests


def judge(shard: Shard, tests: Mapping[str, Ran], status: int) -> Outcome:
    """Say what came of a shard: it passes only if `make` did, and if something passed of each entry that it names."""
    own = [ran for test, ran in tests.items() if shard.covers(test)]
    total = Ran(sum(ran.seconds for ran in own), sum(ran.passed for ran in own))
    if status:
        return Outcome(shard, total, f"make ended with {status}")
    passed = [test for test, ran in tests.items() if ran.passed]
    empty = [entry for entry in shard.tests if not any(is_within(test, entry) for test in passed)]
    return Outcome(shard, total, f"no test ran and passed in {', '.join(empty)}" if empty else None)
