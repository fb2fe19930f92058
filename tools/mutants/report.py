"""What became of the mutants, by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .mutations import Mutation
from .server import HUNG, KILLED, Verdict

HEADER = ("module", "mutants", "killed", "of these by a hang", "equivalent", "score")
TARGET = 0.95  # of the mutants that are not equivalent, killed


class Trial(NamedTuple):
    """A mutant and what became of it; *is_listed* if it is among the equivalent ones."""

    mutation: Mutation
    verdict: Verdict
    is_listed: bool

    @property
    def is_killed(self) -> bool:
        """Whether a test noticed it."""
        return self.verdict.outcome in (KILLED, HUNG)

    @property
    def is_wrongly_listed(self) -> bool:
        """Whether the list of equivalent ones has it, and a test notices it."""
        return self.is_listed and self.is_killed


class Score(NamedTuple):
    """The counts of one module, or of all."""

    mutants: int
    killed: int
    hung: int
    equivalent: int

    @property
    def share(self) -> float:
        """Those killed of those that could be."""
        able = self.mutants - self.equivalent
        return self.killed / able if able else 1.0


def count(trials: Sequence[Trial]) -> Score:
    """Return the score of these trials."""
    killed = sum(trial.is_killed for trial in trials)
    hung = sum(trial.verdict.outcome == HUNG for trial in trials)
    return Score(len(trials), killed, hung, sum(trial.is_listed and not trial.is_killed for trial in trials))


def add_up(scores: Mapping[str, Score]) -> Score:
    """Return the score of all modules."""
    return Score(*(sum(column) for column in zip(Score(0, 0, 0, 0), *scores.values(), strict=True)))


def list_rows(scores: Mapping[str, Score]) -> list[tuple[str, int, int, int, int, str]]:
    """Return name, counts and score of each module, and of all."""
    return [(name, *score, f"{score.share:.0%}") for name, score in {**scores, "all": add_up(scores)}.items()]


def describe(trial: Trial) -> str | None:
    """Return a line for a mutant that needs attention: a survivor, or one that is listed, and killed."""
    mutation, verdict = trial.mutation, trial.verdict
    where = f"line {mutation.number}, {mutation.place}: `{mutation.line}`: {mutation.change}"
    if trial.is_wrongly_listed:
        return f"  listed as equivalent, and killed by {verdict.by}: {where}"
    if not trial.is_killed and not trial.is_listed:
        return f"  {verdict.outcome} ({verdict.seconds:.1f} s): {where}"
    return None
