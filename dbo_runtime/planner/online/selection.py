"""Select the best of the predicted ways to split a step, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.online.ab_trial import get_trial_class
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.predictor import BUCKETS_PER_OCTAVE, get_bucket
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.online.step_memory import StepMemory, can_compare

# A split is tried even if its predicted gain misses the margin by up to this share: costs and their correction may be
# far off. A trial that is predicted to lose much waits for credit.
TRIED_BELOW_MARGIN = 0.5

NO_GAIN = "no gain predicted"  # reason of a decline


def select(
    options: Sequence[SplitChoice], features: BatchFeatures, config: RuntimeConfig, memory: StepMemory
) -> SplitChoice | Decline:
    """Return the fastest of *options* that pays, for a step with these features.

    If none pays by prediction, but the fastest may pay nevertheless, return the fastest with a doubt.
    """
    ranked = sorted((choice for choice in options if choice.changes), key=lambda choice: choice.prediction.split)
    if not ranked:
        return Decline("nowhere to cut", f"{features.tokens} tokens")
    if config.mode == "always":
        return next((choice for choice in ranked if choice.is_cut), ranked[0])
    bucket = get_bucket(features, BUCKETS_PER_OCTAVE)
    for choice in ranked:  # in the worst case, the fastest may lose where a slower one does not
        if memory.is_split(bucket, choice.prediction, config.margin):
            return replace(choice, trial_class=get_trial_class(features, choice.prediction, config.policy))
    fastest = ranked[0]
    declined = decline_unpaid(fastest.prediction, config)
    if not can_compare(fastest, config) or fastest.prediction.gain <= config.margin - TRIED_BELOW_MARGIN:
        return declined
    trial_class = get_trial_class(features, fastest.prediction, config.policy)
    return replace(fastest, trial_class=trial_class, doubt=replace(declined, trial_class=trial_class))


def decline_unpaid(prediction: Prediction, config: RuntimeConfig) -> Decline:
    """Return why a split does not pay."""
    figures = f"{prediction}; DBO_MARGIN asks for more than {config.margin:.1%} less, and no loss if costs are off"
    return Decline(NO_GAIN, figures, prediction.unsplit)
