"""Split or not: the last word, with a memory so that it does not flicker."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

STAY = 0.5  # of the margin: what a split has to gain to stay where it is done already


class Prediction(NamedTuple):
    """What is predicted of a step.

    Attributes:
        whole: seconds unsplit.
        split: seconds split into so many *micro_batches*.
        doubtful: the gain if costs are off by as much as may be, and all of it speaks against splitting.
        beside: names of the ops that are on the `side` lane; of a single micro-batch, what makes the difference.
    """

    whole: float
    split: float
    micro_batches: int
    worst_case: float = 0.0
    beside: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The share of the whole step's time that splitting saves; negative if it costs."""
        return compute_gain(self.whole, self.split)

    def pays(self, margin: float) -> bool:
        """Whether more than *margin* is gained, and nothing lost even if costs are off."""
        return self.gain > margin and self.worst_case >= 0

    @property
    def way(self) -> str:
        """Such as `2 micro-batches`, or `1 micro-batch, keys beside`."""
        return describe_mode(self.micro_batches, self.beside)

    def __str__(self) -> str:
        """Such as `12.10 ms whole, 9.80 ms in 2 micro-batches: 19.0% less (12.0% less if costs are off)`."""
        times = f"{self.whole * 1e3:.2f} ms whole, {self.split * 1e3:.2f} ms in {self.way}"
        return f"{times}: {_describe(self.gain)} ({_describe(self.worst_case)} if costs are off)"


class SplitHysteresis:
    """Opens where the predicted gain exceeds a margin, and nothing is lost even if costs are off.

    It closes again where the gain falls below half of the margin. A pure function of the questions it was asked: ranks
    that ask the same get the same answers.
    """

    def __init__(self) -> None:
        self._open: set[Hashable] = set()

    def decide(self, key: Hashable, prediction: Prediction, margin: float) -> bool:
        """Return whether to split steps like *key*, for which *margin* is a share of the unsplit time."""
        stays = prediction.gain > margin * STAY and prediction.worst_case >= -margin * STAY
        if prediction.pays(margin) or (key in self._open and stays):
            self._open.add(key)
            return True
        self._open.discard(key)
        return False


def compute_gain(whole: float, split: float) -> float:
    """Return the share of *whole* seconds that *split* seconds save."""
    return 1 - split / whole if whole > 0 else 0.0


def describe_mode(micro_batches: int, beside: tuple[str, ...]) -> str:
    """Return what is done to a step: into how many micro-batches it is split, and which ops are on `side`."""
    count = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return f"{count}, {' and '.join(beside)} beside" if beside else count


def _describe(gain: float) -> str:
    return f"{abs(gain):.1%} {'less' if gain >= 0 else 'more'}"
