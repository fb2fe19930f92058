"""Run steps of a kind both ways, split and unsplit, a few times, and keep what measured faster.

A prediction that costs are off by an unknown factor cannot correct itself: what lanes that run together slow each other
by was not measured everywhere, and it differs between large and small steps. Measured pairs of steps can.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.online.correction import SPLIT
from dbo_runtime.planner.online.hysteresis import Prediction

LEAD_PAIRS = 4  # by which one way must have been faster more often than the other
WINDOW_PAIRS = 16  # latest pairs of a kind that count
COST_SHARE = 0.01  # of a kind's unsplit time, as predicted, that trials of splitting may lose
REFRESH_STEPS = 256  # of a kind, between two pairs once it is known which way is faster: costs drift
MAX_KINDS = 256  # that are kept: those met last

Kind = Hashable
"""Steps that are compared with each other: a coarse bucket of their features, and how they are split."""


class Proposal(NamedTuple):
    """What one rank measured since ranks last exchanged it.

    Attributes:
        is_timed: whether any step of this rank was timed.
        pairs: by the text of the kind, logarithms of how much longer than predicted a split step took, by how much
            longer than predicted an unsplit one did; in the order in which they ran.
    """

    is_timed: bool
    pairs: Mapping[str, Sequence[float]]


@dataclass(slots=True)
class _Record:
    """What is known of a kind.

    Attributes:
        pairs: the latest that all ranks agreed on; see `Proposal`.
        own: this rank's pairs on which ranks have not agreed yet.
        unpaired: mode and logarithm of measured by predicted seconds of this rank's last step without a partner.
        credit: seconds that trials of splitting may lose.
        steps: run the standing way since the last trial.
        trials: steps that were run the other way since ranks last agreed.
    """

    pairs: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_PAIRS))
    own: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_PAIRS))
    unpaired: tuple[str, float] | None = None
    credit: float = 0.0
    steps: int = 0
    trials: int = 0

    def judge(self, ratio: float) -> bool | None:
        """Return whether splitting measured faster where an unsplit step is predicted to take *ratio* split ones.

        None if neither way is ahead by enough pairs.
        """
        longest = math.log(ratio) if ratio > 0 else -math.inf
        faster = sum(pair < longest for pair in self.pairs)
        lead = 2 * faster - len(self.pairs)
        return lead > 0 if abs(lead) >= LEAD_PAIRS else None


class Probation:
    """Decides by measured steps where that is known, and by the prediction otherwise.

    A trial is a step that is run the other way than it would be: it is paired with the latest step of its kind that
    was not. Both are divided by what was predicted for them, so steps of one kind may differ in size; that they follow
    each other takes out what changes slowly (a paired comparison: Box, Hunter and Hunter, *Statistics for
    Experimenters*, 1978). A pair says which way is faster, and no more, so that an outlier counts once.
    One way is kept when it leads by `LEAD_PAIRS` pairs: Wald's sequential test (1945) of a sign, which is wrong with
    probability 1 / (1 + (p / (1 - p)) ** 4) if a pair is right with probability p. It takes few pairs where the
    difference is large, and where it is small, the wrong answer is cheap. Without a lead the prediction stands.

    Only a trial of splitting can lose against unsplit steps, so each kind has a credit for these, `COST_SHARE` of its
    own unsplit time, and a trial waits until the credit covers what it loses: as measured, or else as predicted in the
    worst case (a conservative bandit: Wu, Shariff, Lattimore and Szepesvári 2016). Hence kinds that are predicted to
    lose much are tried late and rarely, and none at the expense of another. Trials begin when the ranks have agreed
    that steps are timed, and never begin otherwise.

    Deterministic: ranks that are asked the same, and apply the same proposals, decide the same.
    """

    def __init__(self) -> None:
        self._records: BoundedDict[Kind, _Record] = BoundedDict(MAX_KINDS)
        self._has_measured = False
        self._is_timed = False

    def check(
        self,
        kind: Kind,
        prediction: Prediction,
        doubt: Decline | None,
        margin: float = 0.0,
        correction: float = 1.0,
    ) -> Decline | None:
        """Return why the next step of *kind* is not split; None if it is.

        Args:
            kind: of the step.
            prediction: of it.
            doubt: why it would not be split by prediction alone; None if it would be.
            margin: share of the unsplit time that a split must have gained in a pair to be called faster.
            correction: of split steps by that of unsplit ones, which is in the prediction and not in what is noted.
        """
        record = self._find(kind)
        record.credit += COST_SHARE * prediction.unsplit
        ratio = correction * prediction.unsplit / prediction.split
        measured = record.judge(ratio * (1.0 - margin))
        splits = doubt is None if measured is None else measured
        cost = 0.0 if splits else _estimate_loss(record.pairs, ratio, prediction)
        if self._is_due(record, measured) and cost <= record.credit:
            record.credit -= cost
            record.steps, record.trials = 0, record.trials + 1
            return Decline("on probation", f"in comparison: {prediction}", prediction.unsplit, kind) if splits else None
        record.steps += 1
        if splits:
            return None
        return _decline(kind, prediction, ratio, record.pairs) if doubt is None else doubt

    def observe(self, kind: Kind, mode: str, predicted: float, measured: float) -> None:
        """Add a step's predicted seconds (without correction) and measured seconds."""
        if kind not in self._records or not (0 < predicted < math.inf and 0 < measured < math.inf):
            return
        self._has_measured = True
        record, ratio = self._records[kind], math.log(measured / predicted)
        if record.unpaired is None or record.unpaired[0] == mode:
            record.unpaired = mode, ratio
            return
        difference = ratio - record.unpaired[1]
        record.own.append(difference if mode == SPLIT else -difference)
        record.unpaired = None

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """How many kinds are known, and how many may be."""
        return len(self._records), self._records.max_size

    def propose(self) -> Proposal:
        """Return what this rank measured on which the ranks have not agreed yet."""
        return Proposal(
            self._has_measured, {repr(kind): list(record.own) for kind, record in self._records.items() if record.own}
        )

    def apply(self, proposals: Sequence[Proposal]) -> None:
        """Add the median over all ranks of each pair that every rank has measured [ranks]."""
        self._is_timed = all(proposal.is_timed for proposal in proposals)
        for kind, record in self._records.items():
            record.trials = 0
            measured = [proposal.pairs.get(repr(kind), ()) for proposal in proposals]
            for pair in zip(*measured, strict=False):  # a rank may be behind with the last ones
                record.pairs.append(median(pair))
                record.own.popleft()

    def _find(self, kind: Kind) -> _Record:
        """Return the record of a kind, which is now the one that was met last."""
        record = self._records.pop(kind, None) or _Record()
        self._records[kind] = record
        return record

    def _is_due(self, record: _Record, measured: bool | None) -> bool:
        """Whether the next step may be a trial; between two of them is a step to compare with."""
        is_known = measured is not None or len(record.pairs) == WINDOW_PAIRS
        spacing = REFRESH_STEPS if is_known else 1
        return self._is_timed and record.steps >= spacing and record.trials < LEAD_PAIRS


def get_kind(features: BatchFeatures, prediction: Prediction, policy: tuple[str, int]) -> Kind:
    """Return the kind of a step.

    Steps of a kind have about as many tokens, as much attention for each, and are alike decodes, prefills or both: what
    else differs between them, predictions take into account.
    """
    pairs = features.pairs + features.context_pairs + features.decode_pairs
    requests = features.decodes > 0, features.decodes < features.tokens
    sizes = round(math.log2(features.tokens)), round(math.log2(1 + pairs / features.tokens) / 2)
    return *sizes, *requests, prediction.micro_batches, prediction.side_ops, policy


def _estimate_loss(pairs: Sequence[float], ratio: float, prediction: Prediction) -> float:
    """Return the seconds by which a step takes longer split: as measured, or else as predicted in the worst case."""
    share = _compare(pairs, ratio) if pairs else -prediction.worst_case
    return max(share, 0.0) * prediction.unsplit


def _compare(pairs: Sequence[float], ratio: float) -> float:
    """Return the share by which steps measured longer split than unsplit."""
    return math.exp(median(pairs)) / ratio - 1


def _decline(kind: Kind, prediction: Prediction, ratio: float, pairs: Sequence[float]) -> Decline:
    slower = sum(pair >= math.log(ratio) for pair in pairs)
    longer = _compare(pairs, ratio)
    figures = f"{longer:.1%} longer than unsplit; in {slower} of {len(pairs)} pairs of steps splitting was slower"
    return Decline("measured slower split", figures, prediction.unsplit, kind)
