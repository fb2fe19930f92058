"""Print which shards CI would run and why, or run shards and keep in the ledger what passed. See the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .catalogue import ShardsError, read_catalogue
from .history import History
from .ledger import FILE, read_ledger
from .plan import find_standings, make_plan
from .recording import run_and_record
from .report import describe_plan

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str], root: Path = ROOT) -> int:
    """Obey a command line in one tree."""
    options = parse(words)
    try:
        catalogue, history = read_catalogue(root), History(root)
        if options.command == "run" and (options.names or options.all):
            names = options.names or [shard.name for shard in catalogue.shards]
            return run_and_record(root, [catalogue.get(name) for name in names], together=False)
        standings = find_standings(root, catalogue, read_ledger(root), history)
        plan = make_plan(standings, catalogue.budget, catalogue.oldest)
        print("\n".join(describe_plan(plan, catalogue, history)), flush=True)
        if options.command == "run":
            return run_and_record(root, plan.list_shards(), together=True)
        return int(bool(plan.too_old))
    except ShardsError as error:
        print(f"shards: {error}", file=sys.stderr)
        return 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.shards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan", help="print what CI would run and why; fail if a shard is too old")
    run = commands.add_parser("run", help=f"run shards, those of the plan if none is named, and write {FILE}")
    run.add_argument("names", nargs="*", metavar="SHARD")
    run.add_argument("--all", action="store_true", help="run every shard: hours")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
