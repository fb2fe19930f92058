"""Run shards, and write into the ledger which passed and on what."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .catalogue import Shard, read_catalogue
from .history import History
from .inputs import InputFinder
from .ledger import FILE, Entry, Ledger, read_ledger, write_ledger
from .report import describe_outcome
from .runner import Outcome, run_shards


def run_and_record(root: Path, shards: Sequence[Shard], together: bool) -> int:
    """Run shards, and record each that passes as soon as its call of `make` ends; return whether one failed."""
    catalogue, history = read_catalogue(root), History(root)
    finder = InputFinder(root, catalogue.inputs)
    before = {shard.name: finder.digest(shard) for shard in shards}
    # What is not committed yet belongs to the landing that is being made.
    starts_landing = history.list_changed([FILE]) == []
    ledger = read_ledger(root)
    ledger = replace(ledger, landing=ledger.landing + starts_landing)
    failed = []
    for outcome in run_shards(root, shards, together):
        name, inputs = outcome.shard.name, before[outcome.shard.name]
        afterwards = InputFinder(root, catalogue.inputs)  # reads anew what may have changed meanwhile
        obstacle = outcome.complaint or explain_obstacle(outcome.shard, inputs, afterwards, history)
        print(describe_outcome(outcome, obstacle), flush=True)
        if outcome.complaint:
            failed.append(name)
        elif obstacle is None:
            ledger = ledger.record(name, make_entry(outcome, ledger, inputs, history))
            write_ledger(root, ledger.keep(shard.name for shard in catalogue.shards))
    if failed:
        print(f"shards: failed: {', '.join(failed)}")
    return int(bool(failed))


def explain_obstacle(shard: Shard, before: str, finder: InputFinder, history: History) -> str | None:
    """Return why a shard that passed cannot be recorded, if so: it must have run on what a commit holds."""
    changed = history.list_changed(finder.find_inputs(shard))
    if changed is None:
        return "git knows no commit here"
    if changed:
        return f"commit first: {', '.join(changed[:3])}"
    return None if finder.digest(shard) == before else "its inputs changed while it ran"


def make_entry(outcome: Outcome, ledger: Ledger, inputs: str, history: History) -> Entry:
    """Return what the ledger keeps of a shard that passed."""
    return Entry(
        landing=ledger.landing,
        commit=history.find_commit(),
        date=datetime.date.today().isoformat(),
        seconds=round(outcome.ran.seconds),
        passed=outcome.ran.passed,
        inputs=inputs,
    )
