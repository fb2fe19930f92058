"""How a step is run: what is decided for it, on one rank and for all data parallel ranks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from dbo_runtime.batch import BatchSlice
from dbo_runtime.engine.executor import Executor
from dbo_runtime.planner.online.split_choice import SplitChoice

Mode = Literal["split", "unsplit", "concurrent"]
"""How a step ran: in micro-batches; by the model's own forward; or as one batch with concurrent ops on `side`."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How to run one batch.

    Attributes:
        slices: one per micro-batch.
        executor: of their schedule.
        digest: names the schedule.
        expected: predicted seconds of the step; None without a prediction.
        kind: of the step, if its time is compared with that of unsplit ones; see `Probation`.
    """

    slices: tuple[BatchSlice, ...]
    executor: Executor
    digest: str
    expected: float | None = None
    kind: Hashable | None = None

    @property
    def mode(self) -> Mode:
        """How a step runs by this plan."""
        return "split" if len(self.slices) > 1 else "concurrent"

    @property
    def cuts(self) -> list[int]:
        """The token offsets at which the batch is cut."""
        return [piece.first_token for piece in self.slices[1:]]


@dataclass(frozen=True, slots=True)
class DataParallelSplit:
    """How all data parallel ranks split a step.

    Attributes:
        sizes: tokens of every rank in each micro-batch [micro-batches][ranks].
        choice: the issue order and its prediction; None without costs.
    """

    sizes: tuple[tuple[int, ...], ...]
    choice: SplitChoice | None = None

    @property
    def name(self) -> str:
        """The name of the plan before it is made, the same on all ranks."""
        return "by the settings" if self.choice is None else self.choice.order.name
