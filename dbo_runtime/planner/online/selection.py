"""Select one of the predicted ways to split a step, or none: by what they gain, and by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import SIDE
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT, Correction
from dbo_runtime.planner.online.hysteresis import Prediction, SplitHysteresis
from dbo_runtime.planner.online.predictor import BUCKETS_PER_OCTAVE, get_bucket
from dbo_runtime.planner.online.probation import Probation, get_kind
from dbo_runtime.planner.online.split_choice import SplitChoice

# By which a predicted gain may miss the margin of a split that is tried nevertheless. Costs and their correction may be
# far off; a trial that is predicted to lose much waits for credit.
TRIED_BELOW_MARGIN = 0.5


class Selection:
    """Selects by predictions first, and then by measured steps.

    Args:
        correction: of predictions.

    Attributes:
        probation: what was measured.
    """

    def __init__(self, correction: Correction) -> None:
        self.probation = Probation()
        self._correction = correction
        self._hysteresis = SplitHysteresis()

    @property
    def caches(self) -> dict[str, tuple[int, int]]:
        """How many kinds of steps each part knows, and how many it may."""
        return {"probation": self.probation.size_and_capacity, "hysteresis": self._hysteresis.size_and_capacity}

    def decide(
        self, options: Sequence[SplitChoice], features: BatchFeatures, config: RuntimeConfig
    ) -> SplitChoice | Decline:
        """Return the fastest of *options* that pays, for a step with these features.

        If none does, but the fastest may do nevertheless, return that one with a doubt.
        """
        ranked = sorted((choice for choice in options if choice.changes), key=lambda choice: choice.prediction.split)
        if not ranked:
            return Decline("nowhere to cut", f"{features.tokens} tokens")
        if config.mode == "always":
            return next((choice for choice in ranked if choice.prediction.micro_batches > 1), ranked[0])
        bucket = get_bucket(features, BUCKETS_PER_OCTAVE)
        for choice in ranked:  # the fastest may lose in the worst case where a slower one does not
            if self._hysteresis.decide((bucket, choice.prediction.micro_batches), choice.prediction, config.margin):
                return replace(choice, kind=get_kind(features, choice.prediction, config.policy))
        fastest = ranked[0]
        if not _can_compare(fastest, config) or fastest.prediction.gain <= config.margin - TRIED_BELOW_MARGIN:
            return decline_unpaid(fastest.prediction, config)
        kind = get_kind(features, fastest.prediction, config.policy)
        return replace(fastest, kind=kind, doubt=replace(decline_unpaid(fastest.prediction, config), kind=kind))

    def check_measured(self, decision: SplitChoice | Decline, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return a decision by prediction, or what measured steps of the kind say against it."""
        if isinstance(decision, Decline) or decision.kind is None:
            return decision
        if not _can_compare(decision, config):
            return decision if decision.doubt is None else decision.doubt
        correction = self._correction.factor(SPLIT) / self._correction.factor(UNSPLIT)
        margin = 0.0 if decision.doubt is None else config.margin
        return self.probation.check(decision.kind, decision.prediction, decision.doubt, margin, correction) or decision


def _can_compare(choice: SplitChoice, config: RuntimeConfig) -> bool:
    """Return whether split steps may be compared with unsplit ones.

    Costs that are nothing have no ratio. Where ops are forced on `side`, steps that are not split run them
    concurrently: none runs unsplit, and nothing is predicted of them.
    """
    is_forced = config.side == "on" and SIDE in choice.order.programs[0].lanes
    return config.probation and choice.prediction.split > 0 and not is_forced


def decline_unpaid(prediction: Prediction, config: RuntimeConfig) -> Decline:
    """Return why a split does not pay."""
    figures = f"{prediction}; DBO_MARGIN asks for more than {config.margin:.1%} less, and no loss if costs are off"
    return Decline("no gain predicted", figures, prediction.unsplit)
