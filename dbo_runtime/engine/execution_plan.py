"""How this rank runs a step: its micro-batches, and the executor that runs them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from dbo_runtime.batch import BatchSlice
from dbo_runtime.engine.executor import Executor

Mode = Literal["split", "nano", "unsplit", "concurrent"]
"""How a step ran: in micro-batches, in nano-batches, by the model's own forward, or whole with ops that overlap."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How to run one batch.

    Attributes:
        slices: slice of the batch for each micro-batch.
        executor: runs the plan's schedule.
        expected: predicted seconds of the step; None without a prediction.
        trial_class: class of the step in A/B trials (see `AbTrials`); None if its time is not compared.
        nano_batches: slice of the batch for each nano-batch; empty if token-wise ops are not cut.
    """

    slices: tuple[BatchSlice, ...]
    executor: Executor
    expected: float | None = None
    trial_class: Hashable | None = None
    nano_batches: tuple[BatchSlice, ...] = ()

    @property
    def digest(self) -> str:
        """Hash of the schedule."""
        return self.executor.digest

    @property
    def mode(self) -> Mode:
        """How this plan runs a step."""
        if self.nano_batches:
            return "nano"
        return "split" if len(self.slices) > 1 else "concurrent"

    @property
    def parts(self) -> tuple[BatchSlice, ...]:
        """The slices that outputs come in: nano-batches, or micro-batches."""
        return self.nano_batches or self.slices

    @property
    def cuts(self) -> list[int]:
        """Token offsets at which the batch is cut."""
        return [piece.first_token for piece in self.parts[1:]]
