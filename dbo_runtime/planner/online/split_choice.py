"""How to split a step: the result of a decision of the planner."""

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
        cut: slices and features of the micro-batches.
        trial_class: class of the step in A/B trials (see `AbTrials`); None if its time is not compared.
        doubt: reason for which the prediction alone would leave the step unsplit; None if it would split it.
    """

    order: NamedOrder
    prediction: Prediction
    cut: Cut
    trial_class: TrialClass | None = None
    doubt: Decline | None = None

    @property
    def slices(self) -> tuple[BatchSlice, ...]:
        """One slice for each micro-batch; empty if each data parallel rank has slices of its own."""
        return self.cut.slices

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of every data parallel rank in each micro-batch or nano-batch [parts][ranks]; empty without ranks."""
        return self.cut.sizes

    @property
    def changes(self) -> bool:
        """Whether the choice differs from the unsplit step as the model itself runs it."""
        return self.is_cut or self.prediction.nano_batches > 0 or SIDE in self.order.programs[0].lanes

    @property
    def is_cut(self) -> bool:
        """Whether there are several micro-batches or nano-batches."""
        return max(self.prediction.micro_batches, self.prediction.nano_batches) > 1


def get_cut(split: SplitChoice | Cut) -> Cut:
    """Return the cut of a choice, or the cut itself."""
    return split if isinstance(split, Cut) else split.cut
