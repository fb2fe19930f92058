"""The choice of shards for one CI run, from content alone: the same commit has the same plan on every day."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .catalogue import Catalogue, Shard
from .history import History
from .inputs import InputFinder
from .ledger import Entry, Ledger


@dataclass(frozen=True)
class Standing:
    """A shard, and how it stands in the ledger."""

    shard: Shard
    entry: Entry
    age: int
    """Landings since it last passed, or since it was named."""
    inputs: str
    """The digest of its inputs as they are now."""
    changed: tuple[str, ...] = ()
    """The inputs that differ from the commit on which it last passed, where git knows that commit."""

    @property
    def is_touched(self) -> bool:
        """Return whether the inputs are others than those on which it last passed."""
        return self.entry.inputs != self.inputs

    @property
    def seconds(self) -> int:
        """Return what it costs: as measured, or as estimated."""
        return self.shard.set_up + (self.shard.seconds if self.entry.seconds is None else self.entry.seconds)


@dataclass(frozen=True)
class Plan:
    """What CI runs, and what it leaves out."""

    always: tuple[Standing, ...]
    touched: tuple[Standing, ...]
    stalest: tuple[Standing, ...]
    left: tuple[Standing, ...]
    """Touched, but without room in the budget."""
    rest: tuple[Standing, ...]
    """Neither touched nor among the stalest that fit."""
    too_old: tuple[Standing, ...]

    def list_shards(self) -> list[Shard]:
        """List what is to be run, in order."""
        return [each.shard for each in (*self.always, *self.touched, *self.stalest)]


def find_standings(root: Path, catalogue: Catalogue, ledger: Ledger, history: History) -> list[Standing]:
    """Find out how each shard stands."""
    finder, now = InputFinder(root, catalogue.inputs), ledger.landing + history.count_unrecorded()
    standings = []
    for shard in catalogue.shards:
        entry = ledger.get(shard.name)
        standing = Standing(shard, entry, now - entry.landing, finder.digest(shard))
        if standing.is_touched and entry.commit is not None:
            changed = history.list_changed(finder.find_inputs(shard), entry.commit) or ()
            standing = replace(standing, changed=tuple(changed))
        standings.append(standing)
    return standings


def make_plan(standings: Sequence[Standing], budget: int, oldest: int) -> Plan:
    """Choose the touched shards, then the others, in both cases the stalest first, until the budget is spent."""
    ordered = sort_by_age(each for each in standings if not each.shard.always)
    chosen, left = [], []
    for each in sorted(ordered, key=lambda each: not each.is_touched):  # which keeps the order within both
        if each.seconds <= budget:
            budget -= each.seconds
            chosen.append(each)
        else:
            left.append(each)
    return Plan(
        always=tuple(each for each in standings if each.shard.always),
        touched=tuple(each for each in chosen if each.is_touched),
        stalest=tuple(each for each in chosen if not each.is_touched),
        left=tuple(each for each in left if each.is_touched),
        rest=tuple(each for each in left if not each.is_touched),
        too_old=tuple(each for each in ordered if each.age > oldest),
    )


def sort_by_age(standings: Iterable[Standing]) -> list[Standing]:
    """Return the stalest first. Between those of one age their inputs decide, so that no shard is always the last."""
    return sorted(standings, key=lambda each: (-each.age, each.inputs))
