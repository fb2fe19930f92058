"""Try a fixed sample of mutants of each module of the core; exit with 1 if too many survive. See the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.kept import keep
from tests.support.page import ROOT, make_table, write_section

from .equivalents import describe_stale, read_equivalents
from .mutations import Mutation, list_mutations, take_sample
from .report import HEADER, TARGET, Score, Trial, count, describe, list_rows
from .server import Order, Verdict, find_source
from .targets import TARGETS

COMMAND = "make mutants"
PAGE = ROOT / "docs" / "reliability.md"


def main() -> int:
    """Try mutants, tell of survivors and scores; fail below the target, or if the list of equivalent ones is wrong."""
    options = parse()
    began = time.monotonic()
    mutations = list_all()
    stale = describe_stale(read_equivalents(), mutations)
    samples = {
        name: take_sample(mutations[name], options.count, options.seed)
        for name in TARGETS
        if not options.modules or any(part in name for part in options.modules)
    }
    trials = try_all(samples, options.workers)
    drawn = f"at most {options.count} mutants of each, drawn with seed {options.seed}"
    kept = keep("mutants", {name: {"drawn": drawn, "score": count(found)} for name, found in trials.items()})
    scores = {name: Score(*kept[name]["score"]) for name in TARGETS if name in kept and kept[name]["drawn"] == drawn}
    lines = [*make_table(HEADER, list_rows(scores)), "", f"{len(scores)} of {len(TARGETS)} modules, {drawn}."]
    print("\n".join([*lines, *stale, f"{(time.monotonic() - began) / 60:.0f} minutes"]))
    if options.write_page:
        write_section("mutants", COMMAND, lines, PAGE)
    everything = [trial for found in trials.values() for trial in found]
    return int(bool(stale) or any(trial.is_wrongly_listed for trial in everything) or count(everything).share < TARGET)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help="parts of names of modules; all of them if none is given")
    parser.add_argument("--count", type=int, default=20, help="mutants of each module at most")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2, help="modules at a time")
    parser.add_argument("--write-page", action="store_true", help=f"write the table of {PAGE.name}")
    return parser.parse_args()


def list_all() -> dict[str, list[Mutation]]:
    """Return all mutations of each module."""
    return {name: list_mutations(find_source(ROOT, name).read_text(encoding="utf-8")) for name in TARGETS}


def try_all(samples: Mapping[str, Sequence[Mutation]], workers: int) -> dict[str, list[Trial]]:
    """Try the sample of each module."""
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(try_module, samples, samples.values())
        return dict(zip(samples, found, strict=True))


def try_module(name: str, mutations: Sequence[Mutation]) -> list[Trial]:
    """Try mutants of one module, and report those that need attention."""
    began = time.monotonic()
    order = Order(str(ROOT), name, [f"tests/{file}" for file in TARGETS[name]], list(mutations))
    # Properties draw the same examples each time, so that a mutant is killed each time or never.
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "ci"}
    ran = subprocess.run(
        [sys.executable, "-m", f"{__package__}.server"],
        input=json.dumps(order._asdict()),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if ran.returncode:
        raise SystemExit(f"{name}: see above. Mutants can be tried only where its tests pass.")
    verdicts = [Verdict(*json.loads(line)) for line in ran.stdout.splitlines()]
    listed = {entry.key for entry in read_equivalents().get(name, ())}
    trials = [Trial(one, verdict, one.key in listed) for one, verdict in zip(mutations, verdicts, strict=True)]
    told = [line for trial in trials if (line := describe(trial)) is not None]
    print("\n".join([f"{name}: {count(trials).share:.0%} in {time.monotonic() - began:.0f} s", *told]), flush=True)
    return trials


if __name__ == "__main__":
    sys.exit(main())
