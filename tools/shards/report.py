"""Say in words what a plan holds and what came of a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .catalogue import Catalogue
from .history import History
from .ledger import FILE
from .plan import Plan, Standing
from .runner import Outcome

CORES = 2  # of CI's machine, which runs two files at once
NAMED = 3  # files that changed


def describe_plan(plan: Plan, catalogue: Catalogue, history: History) -> Iterator[str]:
    """Yield lines that say what CI runs, why, and what it leaves out."""
    gaps = history.explain_gaps()
    if gaps:
        yield f"shards: {gaps}: what is touched comes from the content of files, and ages from {FILE} alone"
    for each in plan.always:
        yield f"always: {each.shard.name}, {describe_age(each)}"
    for each in plan.touched:
        yield f"touched: {each.shard.name}, {describe_age(each)}{describe_change(each)}"
    for each in plan.stalest:
        yield f"among the stalest: {each.shard.name}, {describe_age(each)}"
    chosen = (*plan.touched, *plan.stalest)
    yield (
        f"budget: {sum_seconds(chosen)} of {catalogue.budget} s on one core, about "
        f"{sum_seconds(chosen) / CORES / 60:.0f} minutes on {CORES}; "
        f"what always runs takes {sum_seconds(plan.always) / CORES / 60:.0f} more"
    )
    if plan.left:
        yield f"touched, but left for the next run: {name(plan.left)}"
    if plan.rest:
        yield f"unchanged since they passed, and not run: {name(plan.rest)}"
    for each in plan.too_old:
        yield (
            f"FAILED: {each.shard.name} passed last {each.age} landings ago, {catalogue.oldest} are allowed: "
            f'make test-shards SHARDS="{each.shard.name}", then commit {FILE}'
        )


def describe_age(standing: Standing) -> str:
    """Say when a shard passed last."""
    landings = f"{standing.age} landing{'' if standing.age == 1 else 's'} ago"
    if standing.entry.commit is None:
        return f"named {landings} and never recorded, about {standing.seconds} s"
    return f"passed {landings} on {standing.entry.commit[:9]}, {standing.seconds} s"


def describe_change(standing: Standing) -> str:
    """Say which inputs of a shard have changed, as far as git knows."""
    if not standing.changed:
        return ""
    more = len(standing.changed) - NAMED
    return f", changed since: {', '.join(standing.changed[:NAMED])}{f' and {more} more' if more > 0 else ''}"


def describe_outcome(outcome: Outcome, obstacle: str | None) -> str:
    """Say what came of a shard, and whether the ledger has it."""
    ran = f"{outcome.ran.passed} passed, {outcome.ran.seconds:.0f} s on one core"
    if outcome.complaint:
        return f"shard {outcome.shard.name}: FAILED, {outcome.complaint}; {ran}"
    return f"shard {outcome.shard.name}: {ran}, {f'not recorded: {obstacle}' if obstacle else 'recorded'}"


def sum_seconds(standings: Iterable[Standing]) -> int:
    """Return what shards cost together."""
    return sum(each.seconds for each in standings)


def name(standings: Iterable[Standing]) -> str:
    """Return the names of shards, with their ages."""
    return ", ".join(f"{each.shard.name} ({each.age})" for each in standings)
