"""One way to split a step, with what it is predicted to bring."""

from __future__ import annotations

from dataclasses import dataclass

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import SIDE
from dbo_runtime.planner.online.hysteresis import Prediction
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.probation import Kind


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """How to split a step.

    Attributes:
        order: the issue order.
        prediction: of the step's time.
        slices: one per micro-batch; empty where data parallel ranks share a step and each has slices of its own.
        sizes: tokens of every data parallel rank in each micro-batch [micro-batches][ranks]; empty without such ranks.
        kind: of the step, if its time is compared with that of unsplit ones; see `Probation`.
        doubt: why the prediction alone would leave the step unsplit; None if it would not.
    """

    order: NamedOrder
    prediction: Prediction
    slices: tuple[BatchSlice, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    kind: Kind | None = None
    doubt: Decline | None = None

    @property
    def changes(self) -> bool:
        """Whether it differs from the unsplit step with all ops on the lanes on which a model runs them."""
        return self.prediction.micro_batches > 1 or SIDE in self.order.programs[0].lanes
