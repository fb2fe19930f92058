"""The planner decides by costs: whether to split a step, where, in which issue order and on which lanes.

The planner does not search, lower or simulate inside a step. It finds issue orders and their critical paths when it is
prepared, for all steps that the scheduler may put together. After that, a decision multiplies a few small matrices, and
is remembered for steps of its class.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.nano_batches import Rows
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost
from dbo_runtime.planner.costs.op_times import OpTimes
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.cuts import (
    Cut,
    compute_density,
    cut_in_shares,
    list_cuts,
    list_samples,
    list_shared_cuts,
    measure_batch,
)
from dbo_runtime.planner.online.durations import DurationTables, Vector
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.nano_orders import NanoOrders, cut_step, divide_measured
from dbo_runtime.planner.online.order_book import OrderBook
from dbo_runtime.planner.online.placements import Placements
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.predictor import get_uncertainty, make_worst_cases
from dbo_runtime.planner.online.preparation import Preparation
from dbo_runtime.planner.online.selection import NO_GAIN, select
from dbo_runtime.planner.online.shapes import ServingLimits, list_shapes
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.online.step_memory import Remembered, StepClass, StepMemory

MAX_MICRO_BATCHES = 3  # most that `auto` tries: more add little if phases match, and each pays the fixed costs
SEARCH_STATES = 40_000  # states that each search for an order may visit: about a second

SIZES_PER_OCTAVE = 5  # number of classes of steps for each doubling of their tokens
ATTENTION_SHARES = 6  # number of classes by attention's share of the time, from none to all
ALIKE = 0.015  # share of a step's time by which a remembered decision may be worse for another step of the class


class Planner:
    """Plans steps of one model by issue orders that it finds before serving.

    Decisions follow from costs, from the questions asked before, and from the proposals that were applied to the
    memory. Ranks for which these are equal decide alike.

    Args:
        program: ops of one micro-batch. Those on `side` run there only if that is predicted to pay.
        table: costs of the ops.
        limits: largest steps to plan. Larger steps are planned, too, but their predicted times may be a few percent too
            short.
        max_states: states that each search for an order may visit; see `search.find_order`.
        keeps_layers: whether no micro-batch may attend in a layer before all have attended in the one before it.
        shapes: steps to find orders for, in place of those within the limits.
        rows: functions that join and cut values of nano-batches; None if these are predicted only, and not run.

    Attributes:
        memory: decisions and measurements of classes of steps.

    Raises:
        ConfigError: if an op has no cost.
    """

    def __init__(
        self,
        program: Program,
        table: CostTable,
        limits: ServingLimits | None = None,
        max_states: int = SEARCH_STATES,
        keeps_layers: bool = False,
        shapes: Sequence[Batch] | None = None,
        rows: Rows | None = None,
    ) -> None:
        table.times(program, BatchFeatures(1))
        self.program = program
        self.table = table
        self.memory = StepMemory()
        self._shapes = list_shapes(limits or ServingLimits()) if shapes is None else shapes
        self._times = OpTimes(program, table)
        self._counts = Counter(op.name for op in program.ops)
        self._density = compute_density(table, program)
        self._placements = Placements(program, table)
        tables = [table, *make_worst_cases(table, get_uncertainty(table))]
        self._tables = DurationTables(program, tables)
        self._preparation = Preparation(self._placements.programs, self._tables, max_states, keeps_layers)
        divided = divide_measured(self._placements.programs[0], table)
        self._nano = NanoOrders(divided, Preparation([divided], DurationTables(divided, tables), max_states), rows)
        self._books: dict[int, OrderBook] = {}  # those of the settings, by number of micro-batches
        self._made: dict[int, OrderBook] = {}  # and those of earlier settings with the same policy and `side`
        self._booked_for: tuple[object, ...] = ()
        self._config: RuntimeConfig | None = None

    @property
    def unsplit_program(self) -> Program:
        """The program of an unsplit step, which has no `side` lane, as a model itself runs it."""
        return self._placements.programs[0]

    @property
    def can_use_side(self) -> bool:
        """Whether there are ops for `side`, and costs that say how much compute lanes slow each other down."""
        return self._placements.can_use_side

    @property
    def orders(self) -> list[NamedOrder]:
        """The orders that are prepared."""
        return [order for book in self._all_books for order in book.orders]

    @property
    def digest(self) -> str:
        """A text that identifies the prepared orders. Ranks with the same costs and digest predict the same."""
        return ", ".join(book.digest for book in self._all_books)

    @property
    def _all_books(self) -> list[OrderBook]:
        return [*self._books.values(), *self._nano.books.values()]

    def prepare(self, config: RuntimeConfig) -> None:
        """Find the orders for all steps under these settings; this takes a second or two, once for equal settings."""
        if config is self._config or config == self._config:
            return
        self._config = config
        self.memory.forget_decisions()
        counts = self.list_counts(config)
        if (config.policy, config.side) != self._booked_for:
            self._made, self._booked_for = {}, (config.policy, config.side)
        # A step that allows fewer cuts than asked for has fewer micro-batches. One micro-batch cuts nothing.
        most = 1 if config.split == "nano" else max(counts)
        wanted = sorted(count for count in {*counts, *range(2, max(counts))} if count <= most)
        missing = [count for count in wanted if count not in self._made]
        allowed = self._placements.list_allowed(config)
        for count, samples in list_samples(self._shapes, missing, self._density).items():
            self._made[count] = self._preparation.make_book(samples, allowed, config)
        self._books = {count: self._made[count] for count in wanted if count in self._made}
        self._nano.prepare(config, self._shapes)

    def list_counts(self, config: RuntimeConfig) -> list[int]:
        """Return the numbers of micro-batches to choose from; 1 is among them if ops may be concurrent on `side`."""
        return list_counts(config, self._placements)

    def decline_early(self, tokens: int) -> Decline | None:
        """Return why no step of *tokens* tokens can gain; None if that depends on its requests.

        A split can save at most all communication, and the attention to masked pairs that a cut leaves out. No step can
        gain if that is less than the fixed costs that the compute lane pays for each micro-batch. With a `side` lane, a
        step may gain without any cut.
        """
        if self.can_use_side:
            return None
        known = self.memory.too_small
        if tokens not in known:
            known[tokens] = self._judge_size(tokens)
        return known[tokens]

    def choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how to split *batch*, or why not; `mode` and `margin` of the settings decide.

        If an earlier decision for the class suits the step, the step is cut at the same shares of its tokens.
        """
        self.prepare(config)
        features = measure_batch(batch)
        step_class = self._classify(features, batch.cuttable)
        applied = (self._apply(each, batch, features) for each in self.memory.recall(step_class))
        decision = next((each for each in applied if each is not None), None)
        if decision is None:
            counts = [count for count in self.list_counts(config) if count in self._books]
            cuts = list_cuts(batch, counts, self._density) if counts else []
            decision = self._evaluate(features, [*cuts, *self._nano.list_cuts(features)], config)
            self.memory.keep(step_class, decision, batch)
        return self.memory.check_measured(decision, config)

    def choose_data_parallel(self, tokens: Sequence[int], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how all data parallel ranks split a step, or why not, from the number of *tokens* of each [ranks]."""
        self.prepare(config)
        cuts = [cut for cut in list_shared_cuts(tokens, self.list_counts(config)) if len(cut.sizes) in self._books]
        cuts += self._nano.list_shared_cuts(tokens)
        return self.memory.check_measured(self._evaluate(BatchFeatures(max(tokens)), cuts, config), config)

    def choose_unread(self, tokens: Sequence[int], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how to cut a step into nano-batches, or why not, from nothing but the *tokens* of each rank [ranks].

        There is one number without data parallel ranks.
        """
        self.prepare(config)
        features = BatchFeatures(max(tokens))
        cuts = self._nano.list_cuts(features) if len(tokens) == 1 else self._nano.list_shared_cuts(tokens)
        return self.memory.check_measured(self._evaluate(features, cuts, config), config)

    def predict_unsplit(self, features: BatchFeatures) -> float:
        """Return the seconds of an unsplit step, corrected by measured ones."""
        host, tokens = self.table.host, features.tokens
        seconds = host.time_unsplit(self._times.sum(features), len(self.program.ops), tokens)
        return seconds * self.memory.correction.factor(UNSPLIT)

    def _judge_size(self, tokens: int) -> Decline | None:
        features = BatchFeatures(tokens)
        if self._nano.books:  # the order alone may gain, and cuts nothing
            return None
        costs = [(self.table.ops[name], count) for name, count in self._counts.items()]
        hidden = sum(count * cost.time(features) for cost, count in costs if isinstance(cost, CommCost))
        # The tokens of one micro-batch are context for the next, so a cut turns pairs into context pairs.
        cheaper = max(self._density.pair - self._density.context_pair, 0.0)
        hidden += cheaper * tokens**2 / 2
        # Fixed costs of communication are left out, because they may be hidden.
        paid = sum(count * cost.fixed for cost, count in costs if isinstance(cost, ComputeCost))
        paid += self.table.host.split - self.table.host.unsplit
        if hidden >= paid:
            return None
        figures = f"at most {hidden * 1e3:.2f} ms to hide, and splitting costs at least {paid * 1e3:.2f} ms"
        return Decline(NO_GAIN, f"{tokens} tokens have {figures}")

    def _classify(self, features: BatchFeatures, cuttable: bool) -> StepClass:
        seconds, attention = self._times.sum(features), self._times.sum_attention(features)
        return StepClass(
            round(SIZES_PER_OCTAVE * math.log2(features.tokens)),
            round(ATTENTION_SHARES * attention / seconds) if seconds else 0,
            features.prefills > 0,
            features.prefills > 1,
            cuttable,
        )

    def _apply(self, remembered: Remembered, batch: Batch, features: BatchFeatures) -> SplitChoice | Decline | None:
        """Return the decision for an earlier step of the class, adapted to this one; None if it suits this one less."""
        decision, shares = remembered
        unsplit = self.predict_unsplit(features)
        if isinstance(decision, Decline):
            return decision if decision.expected is None else replace(decision, expected=unsplit)
        count = decision.cut.nano_batches
        cut = cut_step(features, count) if count else cut_in_shares(batch, shares)
        if cut is None:
            return None
        ops = self._get_book(cut).predict_one(cut.features, decision.order)
        split = self.table.host.time_split(ops, features.tokens) * self.memory.correction.factor(SPLIT)
        known = decision.prediction
        if split * known.unsplit > unsplit * known.split * (1.0 + ALIKE):
            return None
        prediction = known._replace(unsplit=unsplit, split=split)
        doubt = None if decision.doubt is None else replace(decision.doubt, expected=unsplit)
        return replace(decision, prediction=prediction, cut=cut, doubt=doubt)

    def _evaluate(self, features: BatchFeatures, cuts: Sequence[Cut], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return the best of all cuts and orders."""
        options: list[SplitChoice] = []
        unsplit = self._predict_unsplit(features)
        groups: dict[tuple[int, int], list[Cut]] = {}
        for cut in cuts:
            groups.setdefault((len(cut.features), cut.nano_batches), []).append(cut)
        for alike in groups.values():
            options += self._predict_cuts(features.tokens, unsplit, alike)
        return select(options, features, config, self.memory)

    def _predict_unsplit(self, features: BatchFeatures) -> Vector:
        """Return the seconds of an unsplit step, by each table [tables]."""
        ops = self._tables.sum_ops(np.array([features], dtype=np.float64))[:, 0]
        seconds: Vector = self.table.host.time_unsplit(ops, len(self.program.ops), features.tokens)
        return seconds * self.memory.correction.factor(UNSPLIT)

    def _predict_cuts(self, tokens: int, unsplit: Vector, cuts: Sequence[Cut]) -> list[SplitChoice]:
        """Return a choice for each cut of *tokens* tokens and each order.

        *unsplit* are the seconds of the unsplit step by each table. All cuts are into equally many micro-batches, or
        nano-batches.
        """
        book, nano = self._get_book(cuts[0]), cuts[0].nano_batches
        count = 1 if nano else len(cuts[0].features)
        ops = book.predict([cut.features for cut in cuts])
        split = self.table.host.time_split(ops, tokens) * self.memory.correction.factor(SPLIT)
        longer = np.concatenate([split[1:], split[:1] * (1.0 + self.table.split_error)])
        reference = np.concatenate([unsplit[1:], unsplit[:1]])[:, None, None]
        ratios = np.divide(longer, reference, out=np.ones(longer.shape), where=reference > 0)  # see `compute_gain`
        worst_cases = (1.0 - ratios).min(axis=0).tolist()
        return [
            SplitChoice(order, Prediction(float(unsplit[0]), seconds, count, worst, order.side_ops, nano), cut)
            for cut, of_cut, worst_of_cut in zip(cuts, split[0].tolist(), worst_cases, strict=True)
            for order, seconds, worst in zip(book.orders, of_cut, worst_of_cut, strict=True)
        ]

    def _get_book(self, cut: Cut) -> OrderBook:
        return self._nano.books[cut.nano_batches] if cut.nano_batches else self._books[len(cut.features)]


def list_counts(config: RuntimeConfig, placements: Placements) -> list[int]:
    """Return the numbers of micro-batches to choose from; see `Planner.list_counts`."""
    counts = [*range(2, MAX_MICRO_BATCHES + 1)] if config.micro_batches is None else [config.micro_batches]
    return [1, *counts] if placements.allow_concurrent(config) else counts
