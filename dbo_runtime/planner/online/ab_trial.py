"""A/B trials: steps of a class run both ways, split and unsplit, a few times, and the faster way is kept.

Costs may be off by a factor that no prediction can notice. For example, how much two lanes slow each other down was not
measured for every size of step. Measured pairs of steps do notice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.online.correction import SPLIT
from dbo_runtime.planner.online.prediction import Prediction

LEAD_PAIRS = 4  # one way must have been faster in at least this many more pairs than the other
WINDOW_PAIRS = 16  # number of pairs of a class that count: the latest
COST_SHARE = 0.01  # trials of splitting may lose this share of a class's predicted unsplit time
REFRESH_STEPS = 256  # steps between two trials of a class whose faster way is known; trials go on, because costs drift
ON_TRIAL = "on probation"  # reason of a decline
SLOWER = "measured slower split"  # reason of a decline
MAX_CLASSES = 256  # number of classes that are kept: those met last

TrialClass: TypeAlias = Hashable
"""Key of the steps that are compared with each other: coarse features, and how the steps are split."""


class Proposal(NamedTuple):
    """The measurements of one rank since ranks last exchanged them.

    Attributes:
        is_timed: whether any step of this rank was timed.
        pairs: numbers by class (as text), one for each pair, in the order in which the pairs ran. A number is the
            logarithm of (measured / predicted seconds of the split step) / (measured / predicted seconds of the unsplit
            one).
    """

    is_timed: bool
    pairs: Mapping[str, Sequence[float]]


@dataclass(slots=True)
class _Record:
    """The measurements of one class of steps.

    Attributes:
        pairs: latest pairs that all ranks agreed on; see `Proposal`.
        own: pairs of this rank that ranks have not agreed on yet.
        unpaired: last step of this rank without a partner: its mode, and the logarithm of measured / predicted seconds.
        credit: seconds that trials of splitting may still lose.
        steps: number of steps that ran the standing way since the last trial.
        trials: number of steps that ran the other way since ranks last agreed.
    """

    pairs: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_PAIRS))
    own: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_PAIRS))
    unpaired: tuple[str, float] | None = None
    credit: float = 0.0
    steps: int = 0
    trials: int = 0

    def judge(self, ratio: float) -> bool | None:
        """Return whether splitting measured faster; None if neither way leads by enough pairs.

        *ratio* is the predicted time of an unsplit step divided by that of a split one.
        """
        longest = math.log(ratio) if ratio > 0 else -math.inf
        faster = sum(pair < longest for pair in self.pairs)
        lead = 2 * faster - len(self.pairs)
        return lead > 0 if abs(lead) >= LEAD_PAIRS else None


class AbTrials:
    """Decides by measured steps where there are enough, and by the prediction otherwise.

    Each class has a standing way: the faster one as measured, or else as predicted. A trial is a step that runs the
    other way. It is paired with the latest step of its class that ran the standing way. Each measured time is divided
    by the predicted one, so steps of a class may differ in size. The two steps run shortly after each other, so slow
    changes cancel (a paired comparison: Box, Hunter and Hunter, *Statistics for Experimenters*, 1978). Only the sign of
    a pair counts, so an outlier counts once.

    The way that leads by `LEAD_PAIRS` pairs is kept. This is Wald's sequential test (1945) of a sign. If a pair is
    right with probability p, the test is wrong with probability 1 / (1 + (p / (1 - p)) ** 4). It takes few pairs where
    the difference is large; where it is small, a wrong answer is cheap. Without a lead the prediction stands.

    Only a trial of splitting can lose against unsplit steps. So each class has a credit for such trials: `COST_SHARE`
    of its own unsplit time. A trial waits until the credit covers its loss, as measured or else as predicted in the
    worst case (a conservative bandit: Wu, Shariff, Lattimore and Szepesvári 2016). Classes that are predicted to lose
    much are therefore tried late and rarely, and no class pays for another. Trials begin once the ranks agree that
    their steps are timed.

    Decisions are deterministic: ranks that ask the same questions, and apply the same proposals, decide alike.
    """

    def __init__(self) -> None:
        self._records: BoundedDict[TrialClass, _Record] = BoundedDict(MAX_CLASSES)
        self._has_measured = False
        self._is_timed = False

    def check(
        self,
        trial_class: TrialClass,
        prediction: Prediction,
        doubt: Decline | None,
        margin: float = 0.0,
        correction: float = 1.0,
    ) -> Decline | None:
        """Return why the next step of *trial_class* is not split; None if it is.

        Args:
            trial_class: class of the step.
            prediction: predicted times of the step.
            doubt: reason not to split it by prediction alone; None if the prediction favours a split.
            margin: share of the unsplit time that the split of a pair must gain to count as faster.
            correction: factor of split steps divided by that of unsplit ones. The prediction contains it; the observed
                times do not.
        """
        record = self._find(trial_class)
        record.credit += COST_SHARE * prediction.unsplit
        ratio = correction * prediction.unsplit / prediction.split
        measured = record.judge(ratio * (1.0 - margin))
        splits = doubt is None if measured is None else measured
        cost = 0.0 if splits else _estimate_loss(record.pairs, ratio, prediction)
        if self._is_due(record, measured) and cost <= record.credit:
            record.credit -= cost
            record.steps, record.trials = 0, record.trials + 1
            if not splits:
                return None
            return Decline(ON_TRIAL, f"in comparison: {prediction}", prediction.unsplit, trial_class)
        record.steps += 1
        if splits:
            return None
        return _decline(trial_class, prediction, ratio, record.pairs) if doubt is None else doubt

    def observe(self, trial_class: TrialClass, mode: str, predicted: float, measured: float) -> None:
        """Add the predicted seconds of a step, without correction, and its measured seconds."""
        if trial_class not in self._records or not (0 < predicted < math.inf and 0 < measured < math.inf):
            return
        self._has_measured = True
        record, ratio = self._records[trial_class], math.log(measured / predicted)
        if record.unpaired is None or record.unpaired[0] == mode:
            record.unpaired = mode, ratio
            return
        difference = ratio - record.unpaired[1]
        record.own.append(difference if mode == SPLIT else -difference)
        record.unpaired = None

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """Number of classes that are known, and the most that are kept."""
        return len(self._records), self._records.max_size

    def propose(self) -> Proposal:
        """Return the measurements of this rank that ranks have not agreed on yet."""
        return Proposal(
            self._has_measured,
            {repr(key): list(record.own) for key, record in self._records.items() if record.own},
        )

    def apply(self, proposals: Sequence[Proposal]) -> None:
        """Add each pair that every rank has measured, as the median of the *proposals* of all ranks [ranks]."""
        self._is_timed = all(proposal.is_timed for proposal in proposals)
        for trial_class, record in self._records.items():
            record.trials = 0
            measured = [proposal.pairs.get(repr(trial_class), ()) for proposal in proposals]
            for pair in zip(*measured, strict=False):  # a rank may not have measured the last pairs yet
                record.pairs.append(median(pair))
                record.own.popleft()

    def _find(self, trial_class: TrialClass) -> _Record:
        """Return the record of a class, and make it the one met last."""
        record = self._records.pop(trial_class, None) or _Record()
        self._records[trial_class] = record
        return record

    def _is_due(self, record: _Record, measured: bool | None) -> bool:
        """Return whether the next step may be a trial. Between two trials, a step runs the standing way to compare."""
        is_known = measured is not None or len(record.pairs) == WINDOW_PAIRS
        spacing = REFRESH_STEPS if is_known else 1
        return self._is_timed and record.steps >= spacing and record.trials < LEAD_PAIRS


def get_trial_class(features: BatchFeatures, prediction: Prediction, policy: tuple[str, int]) -> TrialClass:
    """Return the class of a step in trials.

    Steps of a class have about equally many tokens, and about equally much attention per token. Each holds decodes
    only, or each prefills only, or each both. Predictions account for other differences.
    """
    pairs = features.pairs + features.context_pairs + features.decode_pairs
    requests = features.decodes > 0, features.decodes < features.tokens
    sizes = round(math.log2(features.tokens)), round(math.log2(1 + pairs / features.tokens) / 2)
    return *sizes, *requests, prediction.micro_batches, prediction.nano_batches, prediction.side_ops, policy


def _estimate_loss(pairs: Sequence[float], ratio: float, prediction: Prediction) -> float:
    """Return the seconds that a step loses by splitting: as measured, or else as predicted in the worst case."""
    share = _compare(pairs, ratio) if pairs else -prediction.worst_case
    return max(share, 0.0) * prediction.unsplit


def _compare(pairs: Sequence[float], ratio: float) -> float:
    """Return the share of the unsplit time by which split steps took longer, as measured."""
    return math.exp(median(pairs)) / ratio - 1


def _decline(trial_class: TrialClass, prediction: Prediction, ratio: float, pairs: Sequence[float]) -> Decline:
    slower = sum(pair >= math.log(ratio) for pair in pairs)
    longer = _compare(pairs, ratio)
    figures = f"{longer:.1%} longer than unsplit; in {slower} of {len(pairs)} pairs of steps splitting was slower"
    return Decline(SLOWER, figures, prediction.unsplit, trial_class)
