"""How a step is run on this rank: its micro-batches, and what runs them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from dbo_runtime.batch import BatchSlice
from dbo_runtime.engine.executor import Executor

Mode = Literal["split", "unsplit", "concurrent"]
"""How a step ran: in micro-batches; by the model's own forward; or as one batch with concurrent ops on `side`."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How to run one batch.

    Attributes:
        slices: one a micro-batch.
        executor: runs the plan's schedule.
        expected: predicted seconds of the step; None without a prediction.
        trial_class: class of the step, if its time is compared with that of unsplit ones; see `AbTrials`.
    """

    slices: tuple[BatchSlice, ...]
    executor: Executor
    expected: float | None = None
    trial_class: Hashable | None = None

    @property
    def digest(self) -> str:
        """Names the schedule."""
        return self.executor.digest

    @property
    def mode(self) -> Mode:
        """How a step runs by this plan."""
        return "split" if len(self.slices) > 1 else "concurrent"

    @property
    def cuts(self) -> list[int]:
        """The token offsets at which the batch is cut."""
        return [piece.first_token for piece in self.slices[1:]]
