"""Print which shards CI would run and why, or run shards and keep in the ledger what passed. See the package."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .catalogue import Catalogue, Shard, ShardsError, read_catalogue
from .history import History
from .inputs import InputFinder
from .ledger import FILE, Entry, Ledger, read_ledger, write_ledger
from .plan import find_standings, make_plan
from .report import describe_outcome, describe_plan
from .runner import Outcome, run_shards

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Obey the command line."""
    options = parse()
    try:
        catalogue, ledger, history = read_catalogue(ROOT), read_ledger(ROOT), History(ROOT)
        if options.command == "run" and (options.names or options.all):
            names = options.names or [shard.name for shard in catalogue.shards]
            return run_and_record([catalogue.get(name) for name in names], together=False)
        standings = find_standings(ROOT, catalogue, ledger, history)
        plan = make_plan(standings, catalogue.budget, catalogue.oldest)
        print("\n".join(describe_plan(plan, catalogue, history)), flush=True)
        if options.command == "run":
            return run_and_record(plan.list_shards(), together=True)
        return int(bool(plan.too_old))
    except ShardsError as error:
        print(f"shards: {error}", file=sys.stderr)
        return 1


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.shards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan", help="print what CI would run and why; fail if a shard is too old")
    run = commands.add_parser("run", help=f"run shards, those of the plan if none is named, and write {FILE}")
    run.add_argument("names", nargs="*", metavar="SHARD")
    run.add_argument("--all", action="store_true", help="run every shard: hours")
    return parser.parse_args()


def run_and_record(shards: Sequence[Shard], together: bool) -> int:
    """Run shards, and record each that passes as soon as its call of `make` ends; return whether one failed."""
    catalogue, history = read_catalogue(ROOT), History(ROOT)
    before = {shard.name: InputFinder(ROOT, catalogue.inputs).digest(shard) for shard in shards}
    # What is not committed yet belongs to the landing that is being made.
    starts_landing = history.list_changed([FILE]) == []
    ledger = read_ledger(ROOT)
    ledger = replace(ledger, landing=ledger.landing + starts_landing)
    failed = []
    for outcome in run_shards(ROOT, shards, together):
        obstacle = outcome.complaint or explain_obstacle(outcome.shard, before[outcome.shard.name], catalogue, history)
        print(describe_outcome(outcome, obstacle), flush=True)
        if outcome.complaint:
            failed.append(outcome.shard.name)
        elif obstacle is None:
            entry = make_entry(outcome, ledger, before[outcome.shard.name], history)
            ledger = ledger.record(outcome.shard.name, entry)
            write_ledger(ROOT, ledger.keep(shard.name for shard in catalogue.shards))
    if failed:
        print(f"shards: failed: {', '.join(failed)}")
    return int(bool(failed))


def explain_obstacle(shard: Shard, before: str, catalogue: Catalogue, history: History) -> str | None:
    """Return why a shard that passed cannot be recorded, if so: it must have run on what a commit holds."""
    finder = InputFinder(ROOT, catalogue.inputs)
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


if __name__ == "__main__":
    sys.exit(main())
