"""How far predictions are off, learnt slowly from the steps that run."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

UNSPLIT, SPLIT = "unsplit", "split"
WINDOW = 64  # measured steps of each way that count
PERIOD = 64  # steps between two updates
LARGEST_STEP = 0.05  # by which a logarithm may move in one update
LIMIT = math.log(4.0)  # beyond which the costs are wrong, and not only off

Errors = Mapping[str, float]


class Correction:
    """A factor for whole and one for split steps: what they took by what was predicted.

    Robust: an update moves by little, and towards a median. Steps are counted by all ranks alike, each proposes what
    it measured, and all apply the same: the median of the proposals.
    """

    def __init__(self) -> None:
        self._logs = {UNSPLIT: 0.0, SPLIT: 0.0}
        self._errors: dict[str, deque[float]] = {way: deque(maxlen=WINDOW) for way in self._logs}
        self._steps = 0

    def factor(self, way: str) -> float:
        """Return by what to multiply a prediction."""
        return math.exp(self._logs[way])

    def count(self) -> bool:
        """Count a step; return whether an update is due, which is the same on all ranks that count the same steps."""
        self._steps += 1
        return self._steps % PERIOD == 0

    def note(self, way: str, predicted: float, measured: float) -> None:
        """Take in a step that was predicted (without correction) and measured, in seconds."""
        if 0 < predicted < math.inf and 0 < measured < math.inf:
            self._errors[way].append(math.log(measured / predicted))

    def propose(self) -> dict[str, float]:
        """Return the medians of this rank's logarithmic errors, by way; without those that were not measured."""
        return {way: statistics.median(errors) for way, errors in self._errors.items() if errors}

    def apply(self, proposals: Sequence[Errors]) -> None:
        """Move towards the median of what the ranks propose [ranks]."""
        for way, log in self._logs.items():
            proposed = [errors[way] for errors in proposals if way in errors]
            if proposed:
                step = statistics.median(proposed) - log
                moved = log + min(max(step, -LARGEST_STEP), LARGEST_STEP)
                self._logs[way] = min(max(moved, -LIMIT), LIMIT)
