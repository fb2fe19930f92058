"""The planner's memory of classes of steps: the decisions for them, and their measured times.

The memory depends only on the questions that were asked and the proposals that were applied. So ranks that ask the same
questions, and apply the same proposals, remember the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import SIDE
from dbo_runtime.planner.online.ab_trial import AbTrials, Proposal, TrialClass
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT, Correction
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.predictor import Bucket
from dbo_runtime.planner.online.split_choice import SplitChoice

MAX_CLASSES = 4096  # classes of steps that each part of the memory keeps
MAX_DECISIONS = 4  # decisions of a class: requests end in different places, so not every cut suits every step
NOTICEABLE_LOG = 0.005  # change of a factor's logarithm that makes earlier decisions void; smaller ones do not


class StepClass(NamedTuple):
    """The class of a step. Steps of one class are decided alike.

    Attributes:
        size: number of tokens, in coarse units.
        attention: share of the time that attention takes, in coarse units.
        prefills: whether there are prefills.
        several: whether there is more than one prefill.
        cuttable: whether requests may be cut inside.
    """

    size: int
    attention: int
    prefills: bool
    several: bool
    cuttable: bool


class Remembered(NamedTuple):
    """A decision, and the shares of the step's tokens at which it cuts."""

    decision: SplitChoice | Decline
    cut_shares: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Split seconds divided by unsplit seconds; infinite if the step is not split."""
        if isinstance(self.decision, Decline):
            return math.inf
        prediction = self.decision.prediction
        return prediction.split / prediction.unsplit if prediction.unsplit > 0 else 1.0


class StepMemory:
    """Remembers decisions and measured times by class of step.

    Attributes:
        correction: factors by which measured steps differ from predicted ones.
        trials: A/B trials of split against unsplit steps.
        too_small: declines of steps that cannot gain, by their number of tokens.
    """

    def __init__(self) -> None:
        self.too_small: BoundedDict[int, Decline | None] = BoundedDict(MAX_CLASSES)
        self.correction = Correction()
        self.trials = AbTrials()
        self._decided: BoundedDict[StepClass, tuple[Remembered, ...]] = BoundedDict(MAX_CLASSES)
        self._decided_by = [0.0, 0.0]  # logarithms of the unsplit and split factors behind those decisions
        self._split: BoundedDict[tuple[Bucket, int, int], None] = BoundedDict(MAX_CLASSES)

    def forget(self) -> None:
        """Forget everything that was learned from measured steps, and all decisions."""
        self.correction, self.trials = Correction(), AbTrials()
        self._decided_by = [0.0, 0.0]
        self._decided.clear()
        self._split.clear()

    def forget_decisions(self) -> None:
        """Forget decisions, because other settings may lead to others."""
        self._decided.clear()

    def recall(self, step_class: StepClass) -> tuple[Remembered, ...]:
        """Return the decisions for a class; those that gain most come first."""
        return self._decided.get(step_class, ())

    def keep(self, step_class: StepClass, decision: SplitChoice | Decline, batch: Batch) -> None:
        """Keep the decision for *batch*, unless it may not hold for other steps of the class.

        If there are too many decisions, the one that gains least is dropped.
        """
        slices = () if isinstance(decision, Decline) else decision.slices[1:]
        if isinstance(decision, Decline) and not holds_for_class(decision, batch):
            return
        shares = tuple(each.first_token / batch.tokens for each in slices)
        self._decided[step_class] = add_decision(self.recall(step_class), Remembered(decision, shares))

    def is_split(self, bucket: Bucket, prediction: Prediction, margin: float) -> bool:
        """Return whether to split a step of this bucket, and remember the answer.

        A hysteresis keeps decisions from flickering: steps are split once they gain more than the *margin*, and stay
        split until the gain falls below half of it.
        """
        key = bucket, prediction.micro_batches, prediction.nano_batches
        if prediction.pays(margin) or (key in self._split and prediction.still_pays(margin)):
            self._split[key] = None
            return True
        self._split.pop(key, None)
        return False

    def check_measured(self, decision: SplitChoice | Decline, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return a decision by prediction, or a decline if an A/B trial of its class stands against it."""
        if isinstance(decision, Decline) or decision.trial_class is None:
            return decision
        if not can_compare(decision, config):
            return decision if decision.doubt is None else decision.doubt
        correction = self.correction.factor(SPLIT) / self.correction.factor(UNSPLIT)
        margin = 0.0 if decision.doubt is None else config.margin
        against = self.trials.check(decision.trial_class, decision.prediction, decision.doubt, margin, correction)
        return against or decision

    def observe(self, mode: str, predicted: float, measured: float, trial_class: TrialClass | None = None) -> None:
        """Learn from a step: its seconds *predicted* with the present correction, and its *measured* seconds."""
        uncorrected = predicted / self.correction.factor(mode)
        self.correction.observe(mode, uncorrected, measured)
        if trial_class is not None:
            self.trials.observe(trial_class, mode, uncorrected, measured)

    def propose(self) -> tuple[dict[str, float], Proposal]:
        """Return what this rank has learned since ranks last exchanged it."""
        return self.correction.propose(), self.trials.propose()

    def apply(self, proposals: Sequence[tuple[dict[str, float], Sequence[Any]]]) -> None:
        """Apply the proposals of all ranks [ranks]. If factors have changed noticeably, forget decisions by the old."""
        self.trials.apply([Proposal(*measured) for _, measured in proposals])
        self.correction.apply([errors for errors, _ in proposals])
        logs = [math.log(self.correction.factor(mode)) for mode in (UNSPLIT, SPLIT)]
        if max(abs(log - known) for log, known in zip(logs, self._decided_by, strict=True)) > NOTICEABLE_LOG:
            self._decided_by = logs
            self._decided.clear()

    @property
    def sizes_and_capacities(self) -> dict[str, tuple[int, int]]:
        """Number of entries of each part of the memory, and the most that it keeps."""
        return {
            "decisions": (len(self._decided), self._decided.max_size),
            "split classes": (len(self._split), self._split.max_size),
            "trials": self.trials.size_and_capacity,
            "sizes": (len(self.too_small), self.too_small.max_size),
        }


def add_decision(known: Sequence[Remembered], new: Remembered) -> tuple[Remembered, ...]:
    """Return the *known* decisions for a class with a *new* one. Both are in one order: those that gain most first."""
    return tuple(sorted((*known[: MAX_DECISIONS - 1], new), key=lambda each: each.ratio))


def holds_for_class(decline: Decline, batch: Batch) -> bool:
    """Return whether a decline holds for all steps of the class of *batch*, wherever their requests begin and end."""
    return batch.cuttable and (decline.expected is not None or batch.tokens == 1)


def can_compare(choice: SplitChoice, config: RuntimeConfig) -> bool:
    """Return whether split steps may be compared with unsplit ones.

    They may not in three cases:

    - The settings turn A/B trials off (`DBO_PROBATION`).
    - The predicted time is 0, so measured times cannot be divided by it.
    - The settings force ops onto `side`. Steps that are not split then run these ops concurrently. No step runs
      unsplit, and there is no prediction for such a step.
    """
    is_forced = config.side == "on" and SIDE in choice.order.programs[0].lanes
    return config.probation and choice.prediction.split > 0 and not is_forced
