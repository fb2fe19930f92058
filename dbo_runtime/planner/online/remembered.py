"""What was decided for steps of a kind: which decisions are kept, and in which order they are tried for other steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.planner.online.split_choice import SplitChoice

MAX_DECISIONS = 4  # for a kind: requests end elsewhere, so that not every cut suits every step


class StepKind(NamedTuple):
    """What a decision depends on: steps that are equal in this are decided alike.

    Attributes:
        size, attention: tokens, and attention's share of the time, in coarse units.
        prefills, several: whether there are prefills, and more than one.
        cuttable: whether requests may be cut inside.
    """

    size: int
    attention: int
    prefills: bool
    several: bool
    cuttable: bool


class Remembered(NamedTuple):
    """What was decided for a step of a kind, and the shares of its tokens at which it was cut."""

    decision: SplitChoice | Decline
    cut_shares: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Split seconds by unsplit seconds; infinite if the step was not split."""
        if isinstance(self.decision, Decline):
            return math.inf
        prediction = self.decision.prediction
        return prediction.split / prediction.unsplit if prediction.unsplit > 0 else 1.0


def add_decision(known: Sequence[Remembered], new: Remembered) -> tuple[Remembered, ...]:
    """Return the decisions for a kind, those that gain most first: others are for steps which these do not suit.

    *known* are those so far, in that order; the last is dropped where there are too many.
    """
    return tuple(sorted((*known[: MAX_DECISIONS - 1], new), key=lambda each: each.ratio))


def holds_for_all(decline: Decline, batch: Batch) -> bool:
    """Return whether steps of the kind of *batch* are declined, too, wherever its requests begin and end."""
    return batch.cuttable and (decline.expected is not None or batch.tokens == 1)
