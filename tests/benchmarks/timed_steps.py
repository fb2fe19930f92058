"""Steps that were timed, and how those of one mode compare with those of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
COVERED = 0.95  # of resamples, by an interval


class Step(NamedTuple):
    """A step of one worker; also as a list, which is what an RPC makes of it.

    Attributes:
        batch: tokens of each request.
        seconds: from begin to end of `execute_model`.
        cpu_seconds: of the worker's process meanwhile, all threads together.
        planning: seconds until it was decided whether and how to split.
        cpu_planning: of its thread meanwhile.
        is_planned: whether its requests were considered; others are declined by their size or the settings.
        is_split: whether it ran in micro-batches.
    """

    batch: list[int]
    seconds: float
    cpu_seconds: float
    planning: float
    cpu_planning: float
    is_planned: bool
    is_split: bool


class Turn(NamedTuple):
    """The steps in which a server in one mode answered the requests of a round."""

    mode: str
    round: int
    steps: Sequence[Step]


class Ratio(NamedTuple):
    """A ratio and the bounds of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}–{self.high:.3f})"


Times = Sequence[npt.NDArray[np.float64]]
"""Seconds of the steps of each round [rounds][steps]."""


def gather_times(turns: Sequence[Turn], mode: str, get: Callable[[Step], float]) -> Times:
    """Return a figure of all steps of a mode, by round."""
    own = sorted((turn for turn in turns if turn.mode == mode), key=lambda turn: turn.round)
    return [np.array([get(step) for step in turn.steps]) for turn in own]


def compare_quantiles(own: Times, other: Times, quantile: float, seed: int = 0) -> Ratio:
    """Return the ratio of a quantile of all own steps to that of all others, and its bootstrap interval.

    Rounds are drawn with replacement, the same ones for both, because steps of a round are not independent: they share
    requests and what else the machine did then (a cluster bootstrap: Davison and Hinkley, *Bootstrap Methods and their
    Application*, 1997, section 3.8). With a dozen rounds nine in ten such intervals have the true ratio in them.
    """
    rounds, chance = len(own), np.random.default_rng(seed)
    drawn = [compute_ratio(own, other, quantile, chance.integers(rounds, size=rounds)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return Ratio(compute_ratio(own, other, quantile, range(rounds)), float(low), float(high))


def compute_ratio(own: Times, other: Times, quantile: float, rounds: Sequence[int] | npt.NDArray[np.int64]) -> float:
    """Return the ratio of a quantile of these rounds' own steps to that of the others."""
    ends = [np.quantile(np.concatenate([times[number] for number in rounds]), quantile) for times in (own, other)]
    return float(ends[0] / ends[1])


def find_longer(turns: Sequence[Turn], mode: str, other: str, get: Callable[[Step], float]) -> float | None:
    """Return the median of the seconds by which a step took longer than the other mode's of the same round and batch.

    None if no batches were the same.
    """
    pairs = pair_steps(turns, mode, other)
    return median(get(own) - get(others) for own, others in pairs) if pairs else None


def pair_steps(turns: Sequence[Turn], mode: str, other: str) -> list[tuple[Step, Step]]:
    """Return the steps of a mode with the other's at the same place in the same round, where batches are the same."""
    others = {turn.round: turn.steps for turn in turns if turn.mode == other}
    return [
        (own, step)
        for turn in turns
        if turn.mode == mode
        for own, step in zip(turn.steps, others[turn.round], strict=False)
        if own.batch == step.batch
    ]
