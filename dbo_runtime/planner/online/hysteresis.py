"""Whether a predicted split pays, with hysteresis so that decisions do not flicker."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from dbo_runtime.bounded import BoundedDict

MAX_KINDS = 4096  # of steps of which is remembered that they are split
REMAIN_SHARE_OF_MARGIN = 0.5  # what steps that are split already have to gain


class Prediction(NamedTuple):
    """The predicted time of a step.

    Attributes:
        unsplit: seconds unsplit.
        split: seconds split into so many *micro_batches*.
        worst_case: the gain if costs are wrong by their uncertainty, in the direction that is worst for splitting.
        side_ops: names of the ops that are on the `side` lane, the only difference if there is one micro-batch.
    """

    unsplit: float
    split: float
    micro_batches: int
    worst_case: float = 0.0
    side_ops: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The share of the unsplit time that splitting saves; negative if it costs time."""
        return compute_gain(self.unsplit, self.split)

    def pays(self, margin: float) -> bool:
        """Whether more than *margin* is gained, and nothing is lost in the worst case."""
        return self.gain > margin and self.worst_case >= 0

    @property
    def description(self) -> str:
        """Such as `2 micro-batches`, or `1 micro-batch, keys concurrent`."""
        return describe_split(self.micro_batches, self.side_ops)

    def __str__(self) -> str:
        """Such as `12.10 ms unsplit, 9.80 ms in 2 micro-batches: 19.0% less (12.0% less if costs are off)`."""
        times = f"{self.unsplit * 1e3:.2f} ms unsplit, {self.split * 1e3:.2f} ms in {self.description}"
        return f"{times}: {_describe(self.gain)} ({_describe(self.worst_case)} if costs are off)"


class SplitHysteresis:
    """Splits steps of a kind once the predicted gain exceeds a margin and nothing is lost in the worst case.

    They stay split until the gain falls below half of the margin. Decisions depend on earlier questions only: ranks
    that ask the same get the same answers.
    """

    def __init__(self) -> None:
        self._split: BoundedDict[Hashable, None] = BoundedDict(MAX_KINDS)

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """How many kinds are split, and how many may be."""
        return len(self._split), self._split.max_size

    def decide(self, key: Hashable, prediction: Prediction, margin: float) -> bool:
        """Return whether to split steps like *key*, for which *margin* is a share of the unsplit time."""
        still_pays = (
            prediction.gain > margin * REMAIN_SHARE_OF_MARGIN
            and prediction.worst_case >= -margin * REMAIN_SHARE_OF_MARGIN
        )
        if prediction.pays(margin) or (key in self._split and still_pays):
            self._split[key] = None
            return True
        self._split.pop(key, None)
        return False


def compute_gain(unsplit: float, split: float) -> float:
    """Return the share of *unsplit* seconds that *split* seconds save."""
    return 1 - split / unsplit if unsplit > 0 else 0.0


def describe_split(micro_batches: int, side_ops: tuple[str, ...]) -> str:
    """Return how a step is split: into how many micro-batches, and which ops are concurrent on `side`."""
    count = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return f"{count}, {' and '.join(side_ops)} concurrent" if side_ops else count


def _describe(gain: float) -> str:
    return f"{abs(gain):.1%} {'less' if gain >= 0 else 'more'}"
