"""The predicted time of a step, unsplit and split, and whether splitting it pays."""

from __future__ import annotations

from typing import NamedTuple

REMAIN_SHARE_OF_MARGIN = 0.5  # to stay split, steps have to gain this share of the margin


class Prediction(NamedTuple):
    """The predicted time of a step.

    Attributes:
        unsplit: seconds of the unsplit step.
        split: seconds of the split step.
        micro_batches: number of micro-batches.
        worst_case: gain if costs are wrong by their uncertainty, in the direction that is worst for splitting.
        side_ops: names of the ops on the `side` lane. With one micro-batch, nothing else differs from the unsplit step.
        nano_batches: number of nano-batches; 0 for micro-batches.
    """

    unsplit: float
    split: float
    micro_batches: int
    worst_case: float = 0.0
    side_ops: tuple[str, ...] = ()
    nano_batches: int = 0

    @property
    def gain(self) -> float:
        """The share of the unsplit time that splitting saves; negative if it costs time."""
        return compute_gain(self.unsplit, self.split)

    def pays(self, margin: float) -> bool:
        """Return whether splitting gains more than *margin*, and loses nothing in the worst case."""
        return self.gain > margin and self.worst_case >= 0

    def still_pays(self, margin: float) -> bool:
        """Return whether steps that are split stay split.

        They have to gain more than half of the *margin*, and may lose up to half of it in the worst case.
        """
        share = margin * REMAIN_SHARE_OF_MARGIN
        return self.gain > share and self.worst_case >= -share

    @property
    def description(self) -> str:
        """Text such as `2 micro-batches`, or `1 micro-batch, keys concurrent`."""
        return describe_split(self.micro_batches, self.side_ops, self.nano_batches)

    def __str__(self) -> str:
        """Text such as `12.10 ms unsplit, 9.80 ms in 2 micro-batches: 19.0% less (12.0% less if costs are off)`."""
        times = f"{self.unsplit * 1e3:.2f} ms unsplit, {self.split * 1e3:.2f} ms in {self.description}"
        return f"{times}: {_describe(self.gain)} ({_describe(self.worst_case)} if costs are off)"


def compute_gain(unsplit: float, split: float) -> float:
    """Return the share of *unsplit* seconds that *split* seconds save."""
    return 1 - split / unsplit if unsplit > 0 else 0.0


def describe_split(micro_batches: int, side_ops: tuple[str, ...], nano_batches: int = 0) -> str:
    """Return a text that says how many micro-batches or nano-batches a step has, and which ops are on `side`."""
    if nano_batches:
        return f"{nano_batches} nano-batch{'es' if nano_batches > 1 else ''}"
    count = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return f"{count}, {' and '.join(side_ops)} concurrent" if side_ops else count


def _describe(gain: float) -> str:
    return f"{abs(gain):.1%} {'less' if gain >= 0 else 'more'}"
