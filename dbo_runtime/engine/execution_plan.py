"""How this rank runs a step: its micro-batches, and the executor that runs them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from dbo_runtime.batch import BatchSlice
from dbo_runtime.engine.executor import Executor

Mode = Literal["split", "unsplit", "concurrent"]
"""How a step ran: in micro-batches, by the model's own forward, or as one batch with concurrent ops on `side`."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How to run one batch.

    Attributes:
        slices: slice of the batch for each micro-batch.
        executor: runs the plan's schedule.
        expected: predicted seconds of the step; None without a prediction.
        trial_class: class of the step in A/B trials (see `AbTrials`); None if its time is not compared.
    """

    slices: tuple[BatchSlice, ...]
    executor: Executor
    expected: float | None = None
    trial_class: Hashable | None = None

    @property
    def digest(self) -> str:
        """Hash of the schedule."""
        return self.executor.digest

    @property
    def mode(self) -> Mode:
        """How this plan runs a step."""
        return "split" if len(self.slices) > 1 else "concurrent"

    @property
    def cuts(self) -> list[int]:
        """Token offsets at which the batch is cut."""
        return [piece.first_token for piece in self.slices[1:]]
