"""Planning while requests are served: nothing is searched for, lowered or simulated inside a step.

Issue orders and their critical paths are found when the planner is prepared, for all steps that the scheduler may put
together. After that a decision multiplies a few small matrices, and decisions for steps of a kind are remembered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dbo_runtime.batch import (
    BOUNDARY_TOLERANCE,
    Batch,
    BatchSlice,
    list_shares,
    place_cuts,
    share_evenly,
    slice_batch,
)
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_times import OpTimes
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.cuts import CostSums, balance_targets, measure_batch, measure_slices
from dbo_runtime.planner.online.durations import DurationTables, Vector
from dbo_runtime.planner.online.hysteresis import Prediction
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.order_book import OrderBook
from dbo_runtime.planner.online.planner import ONLINE_SEARCH_STATES, Planner
from dbo_runtime.planner.online.predictor import get_uncertainty, make_worst_cases
from dbo_runtime.planner.online.preparation import Preparation
from dbo_runtime.planner.online.remembered import Remembered, StepKind, add_decision, holds_for_all
from dbo_runtime.planner.online.shapes import ServingLimits, list_shapes
from dbo_runtime.planner.online.split_choice import SplitChoice

MAX_REMEMBERED_KINDS = 4096
SIZES_PER_OCTAVE = 5  # of the tokens of a step: those between are of a kind
ATTENTION_SHARES = 6  # of the time of a step: between none and all

NOTICEABLE_LOG = 0.005  # of a factor of the correction: decisions do not follow smaller changes at once
ALIKE = 0.015  # share of a step's time by which a remembered decision may be worse for another step of the kind

SliceFeatures = tuple[BatchFeatures, ...]


class _Cut(NamedTuple):
    """Where to cut a step, and what each micro-batch computes.

    Attributes:
        slices, sizes: of this rank's batch, or of all data parallel ranks; see `SplitChoice`.
    """

    slice_features: SliceFeatures
    slices: tuple[BatchSlice, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()


class PreparedPlanner(Planner):
    """Plans steps by issue orders, and their critical paths, which it finds before serving.

    Decisions follow from costs and from what was asked before; ranks that are asked the same decide the same.

    Args:
        program, table, max_states, keeps_layers: the arguments of `Planner`.
        limits: of the steps to plan. Larger ones are planned, too, but predictions may be too short by a few percent.
    """

    def __init__(
        self,
        program: Program,
        table: CostTable,
        limits: ServingLimits | None = None,
        max_states: int = ONLINE_SEARCH_STATES,
        keeps_layers: bool = False,
    ) -> None:
        super().__init__(program, table, max_states, keeps_layers)
        self._limits = limits or ServingLimits()
        self._times = OpTimes(program, table)
        self._tables = DurationTables(program, [table, *make_worst_cases(table, get_uncertainty(table))])
        self._preparation = Preparation(self._orders.placements, self._tables, max_states, keeps_layers)
        self._config: RuntimeConfig | None = None
        self._prepared_for: tuple[object, ...] = ()
        self._books: dict[int, OrderBook] = {}
        self._remembered_logs = [0.0, 0.0]  # of the factors for unsplit and split steps with which decisions were made
        self._remembered: BoundedDict[StepKind, tuple[Remembered, ...]] = BoundedDict(MAX_REMEMBERED_KINDS)

    @property
    def orders(self) -> list[NamedOrder]:
        """The orders that are prepared."""
        return [order for book in self._books.values() for order in book.orders]

    @property
    def digest(self) -> str:
        """Names what is prepared: ranks with the same costs and digest predict the same."""
        return ", ".join(book.digest for book in self._books.values())

    def describe_caches(self) -> dict[str, tuple[int, int]]:
        """Return how many entries each cache has, and how many it may have."""
        return {**super().describe_caches(), "kinds": (len(self._remembered), self._remembered.max_size)}

    def prepare(self, config: RuntimeConfig) -> None:
        """Find the orders for all steps under these settings, which takes a second or two; nothing if that is done."""
        if config is self._config or config == self._config:
            return
        self._config = config
        self._remembered.clear()
        prepared_for = config.policy, config.side, config.micro_batches
        if prepared_for != self._prepared_for:
            allowed = self._orders.list_allowed(config)
            self._books = {
                count: self._preparation.make_book(samples, allowed, config)
                for count, samples in self._list_samples(_list_counts(self.list_parts(config))).items()
            }
            self._prepared_for = prepared_for

    def choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how to split *batch*, or why not; `mode` and `margin` of the settings decide.

        Steps of a kind are cut, and predicted, in proportion to the first of them; or to one that was decided later, if
        that suits them better.
        """
        self.prepare(config)
        features = measure_batch(batch)
        kind = self._get_kind(features, batch.cuttable)
        remembered = self._remembered.get(kind, ())
        applied = (self._apply(each, batch, features) for each in remembered)
        decision = next((each for each in applied if each is not None), None)
        if decision is None:
            decision = self._evaluate(features, self._list_cuts_of(batch, self._list_prepared_parts(config)), config)
            slices = () if isinstance(decision, Decline) else decision.slices[1:]
            shares = tuple(piece.first_token / features.tokens for piece in slices)
            if isinstance(decision, SplitChoice) or holds_for_all(decision, batch):
                self._remembered[kind] = add_decision(remembered, Remembered(decision, shares))
        return self._selection.check_measured(decision, config)

    def choose_data_parallel(self, tokens: Sequence[int], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how all data parallel ranks split a step, from the *tokens* of each [ranks]; see `Planner`."""
        self.prepare(config)
        features = BatchFeatures(max(tokens))
        shares = [sizes for sizes in list_shares(tokens, self.list_parts(config)) if len(sizes) in self._books]
        cuts = [_Cut(tuple(BatchFeatures(max(part)) for part in sizes), sizes=sizes) for sizes in shares]
        return self._selection.check_measured(self._evaluate(features, cuts, config), config)

    def correct(self, proposals: Sequence[dict[str, float]]) -> None:
        """Apply the proposals of all ranks, and forget decisions once factors differ noticeably from theirs."""
        super().correct(proposals)
        logs = [math.log(self.correction.factor(mode)) for mode in (UNSPLIT, SPLIT)]
        if max(abs(log - known) for log, known in zip(logs, self._remembered_logs, strict=True)) > NOTICEABLE_LOG:
            self._remembered_logs = logs
            self._remembered.clear()

    def forget(self) -> None:
        """Forget what measured steps taught; what is prepared stays."""
        super().forget()
        self._remembered_logs = [0.0, 0.0]
        self._remembered.clear()

    def _list_prepared_parts(self, config: RuntimeConfig) -> list[int]:
        """Return the numbers of micro-batches to choose from, but for more than the largest steps have tokens."""
        return [count for count in self.list_parts(config) if count in self._books]

    def _get_kind(self, features: BatchFeatures, cuttable: bool) -> StepKind:
        seconds, attention = self._times.sum(features), self._times.sum_attention(features)
        return StepKind(
            round(SIZES_PER_OCTAVE * math.log2(features.tokens)),
            round(ATTENTION_SHARES * attention / seconds) if seconds else 0,
            features.prefills > 0,
            features.prefills > 1,
            cuttable,
        )

    def _apply(self, remembered: Remembered, batch: Batch, features: BatchFeatures) -> SplitChoice | Decline | None:
        """Return what was decided for another step of the kind for this one; None if that suits this one less well."""
        decision, shares = remembered
        unsplit = self.predict_unsplit(features)
        if isinstance(decision, Decline):
            return decision if decision.expected is None else replace(decision, expected=unsplit)
        cut = place_cuts(batch, [round(share * features.tokens) for share in shares])
        if len(cut) < len(shares):
            return None
        slices = slice_batch(batch, cut)
        ops = self._books[len(slices)].predict_one(measure_slices(batch, slices), decision.order)
        host = self.table.host
        split = max(ops + host.split + host.split_per_token * features.tokens, 0.0) * self.correction.factor(SPLIT)
        known = decision.prediction
        if split * known.unsplit > unsplit * known.split * (1.0 + ALIKE):
            return None
        prediction = Prediction(unsplit, split, known.micro_batches, known.worst_case, known.side_ops)
        doubt = None if decision.doubt is None else replace(decision.doubt, expected=unsplit)
        return SplitChoice(decision.order, prediction, slices, (), decision.kind, doubt)

    def _evaluate(self, features: BatchFeatures, cuts: Sequence[_Cut], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return what is best of all cuts and orders."""
        options: list[SplitChoice] = []
        unsplit = self._predict_unsplit(features)
        for count in dict.fromkeys(len(cut.slice_features) for cut in cuts):
            of_count = [cut for cut in cuts if len(cut.slice_features) == count]
            options += self._predict_cuts(features.tokens, unsplit, of_count)
        return self._selection.decide(options, features, config)

    def _predict_cuts(self, tokens: int, unsplit: Vector, cuts: Sequence[_Cut]) -> list[SplitChoice]:
        """Return a choice for each cut of *tokens* tokens and each order; *unsplit* are the seconds by each table.

        All cuts are into equally many micro-batches.
        """
        count = len(cuts[0].slice_features)
        book, host = self._books[count], self.table.host
        outside = host.split + host.split_per_token * tokens
        ops = book.predict([cut.slice_features for cut in cuts])
        split = np.maximum(ops + outside, 0.0) * self.correction.factor(SPLIT)
        longer = np.concatenate([split[1:], split[:1] * (1.0 + self.table.split_error)])
        reference = np.broadcast_to(np.append(unsplit[1:], unsplit[0])[:, None, None], longer.shape)
        ratios = np.divide(longer, reference, out=np.ones_like(longer), where=reference > 0)  # see `compute_gain`
        worst_cases = (1.0 - ratios).min(axis=0).tolist()
        return [
            SplitChoice(
                order, Prediction(float(unsplit[0]), seconds, count, worst, order.side_ops), cut.slices, cut.sizes
            )
            for cut, of_cut, worst_of_cut in zip(cuts, split[0].tolist(), worst_cases, strict=True)
            for order, seconds, worst in zip(book.orders, of_cut, worst_of_cut, strict=True)
        ]

    def _predict_unsplit(self, features: BatchFeatures) -> Vector:
        """Return the seconds of an unsplit step by each table [tables]."""
        host = self.table.host
        ops = self._tables.sum_ops(np.array([features], dtype=np.float64))[:, 0]
        outside = host.unsplit + host.unsplit_per_token * features.tokens
        seconds: Vector = np.maximum(np.maximum(ops, host.issue_unsplit(len(self.program.ops))) + outside, 0.0)
        return seconds * self.correction.factor(UNSPLIT)

    def _list_cuts_of(self, batch: Batch, parts: Sequence[int]) -> list[_Cut]:
        """Return the cuts to predict: even by tokens, and even by cost."""
        sums = CostSums(batch, self._density)
        cuts: dict[tuple[int, ...], _Cut] = {}
        for count in parts:
            for targets in (share_evenly(batch, count), balance_targets(sums, count)):
                cut = place_cuts(batch, targets)
                if cut not in cuts and (cut or 1 in parts):
                    cuts[cut] = _measure_cut(batch, cut)
        return list(cuts.values())

    def _list_samples(self, parts: Sequence[int]) -> dict[int, list[SliceFeatures]]:
        """Return micro-batches of steps that stand for all, by their number.

        Cuts are those of the planner, and as far from them as boundaries of requests may be.
        """
        samples: dict[int, dict[SliceFeatures, None]] = defaultdict(dict)
        for batch in list_shapes(self._limits):
            sums = CostSums(batch, self._density)
            for count in parts:
                even = share_evenly(batch, count)
                shift = int(BOUNDARY_TOLERANCE * batch.tokens / count)
                shifted = [tuple(target + by for target in even) for by in (-shift, shift)]
                spread = tuple(target + (-shift, shift)[number % 2] for number, target in enumerate(even))
                balanced = balance_targets(sums, count)
                for cut in (place_cuts(batch, even), place_cuts(batch, balanced), *shifted, spread):
                    if len(cut) == count - 1 and all(left < right for left, right in pairwise((0, *cut, batch.tokens))):
                        samples[count][_measure_cut(batch, cut).slice_features] = None
        return {count: list(of_count) for count, of_count in samples.items()}


def _list_counts(parts: Sequence[int]) -> list[int]:
    """Return the numbers of micro-batches that may result: fewer than asked for where a batch allows no more cuts."""
    return sorted({*parts, *range(2, max(parts))})


def _measure_cut(batch: Batch, cut: Sequence[int]) -> _Cut:
    slices = slice_batch(batch, cut, agreed=True)
    return _Cut(measure_slices(batch, slices), slices)
