"""How a step is split, by costs: the one noun for what the planner decides."""

from __future__ import annotations

from dataclasses import dataclass

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import SIDE
from dbo_runtime.planner.online.ab_trial import TrialClass
from dbo_runtime.planner.online.cuts import Cut
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.prediction import Prediction


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """How to split a step.

    Attributes:
        order: issue order.
        prediction: predicted times of the step.
        cut: offsets and features of the micro-batches.
        trial_class: class of the step, if its time is compared with that of unsplit ones; see `AbTrials`.
        doubt: reason for which the prediction alone would leave the step unsplit; None if it would not.
    """

    order: NamedOrder
    prediction: Prediction
    cut: Cut
    trial_class: TrialClass | None = None
    doubt: Decline | None = None

    @property
    def slices(self) -> tuple[BatchSlice, ...]:
        """One slice a micro-batch; none where each data parallel rank has slices of its own."""
        return self.cut.slices

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of every data parallel rank in each micro-batch [micro-batches][ranks]; none without such ranks."""
        return self.cut.sizes

    @property
    def changes(self) -> bool:
        """Whether it differs from the unsplit step with all ops on the lanes on which a model runs them."""
        return self.prediction.micro_batches > 1 or SIDE in self.order.programs[0].lanes
