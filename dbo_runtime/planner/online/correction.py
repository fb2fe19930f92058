"""Correct predictions by factors that are learned slowly from measured steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

UNSPLIT, SPLIT = "unsplit", "split"
WINDOW_STEPS = 64  # number of measured steps of each mode that count: the latest
PERIOD_STEPS = 64  # steps between two updates
MAX_LOG_CHANGE = 0.05  # largest change of a factor's logarithm in one update
MAX_LOG = math.log(4.0)  # largest logarithm of a factor: beyond it, the costs were measured on something else

Errors = Mapping[str, float]


class Correction:
    """Two factors, for unsplit and for split steps: measured divided by predicted seconds.

    Outliers do little harm: an update changes a factor only a little, towards a median. All ranks count the same steps.
    Each proposes what it measured, and all apply the same proposals.
    """

    def __init__(self) -> None:
        self._logs = {UNSPLIT: 0.0, SPLIT: 0.0}
        self._errors: dict[str, deque[float]] = {mode: deque(maxlen=WINDOW_STEPS) for mode in self._logs}
        self._steps = 0

    def factor(self, mode: str) -> float:
        """Return the factor to multiply a prediction by."""
        return math.exp(self._logs[mode])

    def count(self) -> bool:
        """Count a step; return whether an update is due. Ranks that count the same steps get the same answer."""
        self._steps += 1
        return self._steps % PERIOD_STEPS == 0

    def observe(self, mode: str, predicted: float, measured: float) -> None:
        """Add a step's predicted seconds (without correction) and measured seconds."""
        if 0 < predicted < math.inf and 0 < measured < math.inf:
            self._errors[mode].append(math.log(measured / predicted))

    def propose(self) -> dict[str, float]:
        """Return the median of this rank's logarithmic errors, by mode; modes without measured steps are left out."""
        return {mode: statistics.median(errors) for mode, errors in self._errors.items() if errors}

    def apply(self, proposals: Sequence[Errors]) -> None:
        """Move each factor towards the median of the proposals of all ranks [ranks]."""
        for mode, log in self._logs.items():
            proposed = [errors[mode] for errors in proposals if mode in errors]
            if proposed:
                change = statistics.median(proposed) - log
                moved = log + min(max(change, -MAX_LOG_CHANGE), MAX_LOG_CHANGE)
                self._logs[mode] = min(max(moved, -MAX_LOG), MAX_LOG)
