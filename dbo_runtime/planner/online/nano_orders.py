"""The orders of steps whose token-wise ops are cut into nano-batches, and the features of their ops.

A joint op takes all tokens, so its features are those of the step. Each nano-batch has features of its own, of which
only the number of tokens matters: what depends on requests is joint. So a step in nano-batches is predicted like one in
micro-batches, with one more set of features: that of the step comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dbo_runtime.batch import Batch, split_evenly
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.divided_ops import divide_ops
from dbo_runtime.ir.nano_batches import NO_ROWS, Rows, cut_program
from dbo_runtime.ir.policies import get_policy, sequential
from dbo_runtime.ir.program import Program
from dbo_runtime.nano_sizes import share_nano_batches, slice_nano_batches
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.cuts import Cut, Features, measure_batch
from dbo_runtime.planner.online.durations import Vector
from dbo_runtime.planner.online.named_order import COMPARED_PERIODS, NamedOrder, RepeatingSchedule
from dbo_runtime.planner.online.order_book import OrderBook
from dbo_runtime.planner.online.preparation import SHORTEST_STEP, Preparation
from dbo_runtime.planner.search.period import keep_few_layers

COUNTS = (1, 2, 3, 4, 6, 8)
"""Numbers of nano-batches to choose from. With 1, nothing is cut: only the model's own ops overlap."""

KEPT_COUNTS = 4
"""Most numbers of nano-batches that steps are predicted with; more would take longer inside a step, and gain little."""

KEPT_LOSS = 0.005
"""Share by which a step may take longer with fewer numbers of nano-batches than with all of `COUNTS`."""

MAX_BOOKS = 4 * len(COUNTS)  # books that are kept, those of earlier settings among them
POLICIES = (("alternate", 0), ("staggered", 1), ("staggered", 2))
KEPT_LAYERS = COMPARED_PERIODS + 3  # equal layers of a short schedule: a start, the compared ones, and an end


class NanoOrders:
    """Prepares the orders of one program in nano-batches.

    Args:
        program: ops of one micro-batch, without `side`; see `divide_measured`.
        preparation: prepares orders of this program.
        rows: functions that join and cut values; None if orders are predicted only, and not run.

    Attributes:
        books: prepared orders, by number of nano-batches.
    """

    def __init__(self, program: Program, preparation: Preparation, rows: Rows | None = None) -> None:
        self.books: dict[int, OrderBook] = {}
        self._made: BoundedDict[tuple[int, tuple[str, int]], OrderBook] = BoundedDict(MAX_BOOKS)  # the latest
        self._program = program
        self._preparation = preparation
        self._rows = rows or NO_ROWS
        self._token_wise = Counter(op.name for op in program.ops if op.token_wise)
        self._joint = Counter(op.name for op in program.ops if not op.token_wise)
        self._names = tuple(dict.fromkeys(op.name for op in program.ops))

    def prepare(self, config: RuntimeConfig, shapes: Sequence[Batch]) -> None:
        """Find the orders under these settings, for steps like *shapes*, which are the same each time."""
        counts = self.list_counts(config)
        for count in counts:
            if (count, config.policy) in self._made:
                continue
            cuts = [cut_step(measure_batch(batch), count) for batch in shapes]
            samples = [*dict.fromkeys(cut.features for cut in cuts if cut is not None)]
            if samples:
                order = self._choose_order(count, config, partial(self._preparation.estimate, samples))
                book = self._preparation.make_nano_book(samples, order, self.count_ops(count))
                self._made[count, config.policy] = book
        known = {count: self._made.get((count, config.policy)) for count in counts}
        books = {count: book for count, book in known.items() if book is not None}
        self.books = _keep_best(books, [measure_batch(batch) for batch in shapes])

    def list_cuts(self, features: BatchFeatures) -> list[Cut]:
        """Return the cuts to predict for a step with these features."""
        cuts = (cut_step(features, count) for count in self.books)
        return [cut for cut in cuts if cut is not None]

    def list_shared_cuts(self, tokens: Sequence[int]) -> list[Cut]:
        """Return the cuts to predict for a step of data parallel ranks, from the *tokens* of each [ranks]."""
        cuts = (cut_shared_step(tokens, count) for count in self.books)
        return [cut for cut in cuts if cut is not None]

    def list_counts(self, config: RuntimeConfig) -> list[int]:
        """Return the numbers of nano-batches to choose from; none if the settings or the program allow none."""
        if config.split == "micro" or not self._token_wise:
            return []
        return [*COUNTS] if config.micro_batches is None else [config.micro_batches]

    def _choose_order(self, count: int, config: RuntimeConfig, estimate: Callable[[NamedOrder], float]) -> NamedOrder:
        """Return the order for a number of nano-batches: with `optimal`, that of the best of the common policies.

        They are compared with few layers, because making an order of all layers takes long.
        """
        policies = POLICIES if config.policy[0] == "optimal" and count > 1 else (config.policy,)
        few = keep_few_layers(self._program, KEPT_LAYERS)
        program = self._program if few is None else few.program
        short = [
            replace(self._make_order(program, count, policy), repeating=self._shorten(count, policy))
            for policy in policies
        ]
        best = min(range(len(short)), key=lambda number: estimate(short[number])) if len(short) > 1 else 0
        return replace(self._make_order(self._program, count, policies[best]), repeating=short[best].repeating)

    def count_ops(self, count: int) -> Vector:
        """Return the number of ops of each kind: those with the step's features, then those of each nano-batch."""
        if count == 1:
            return np.array([self._joint[name] + self._token_wise[name] for name in self._names], dtype=np.float64)
        joint = [self._joint[name] for name in self._names]
        cut = [self._token_wise[name] for name in self._names]
        return np.array([*joint, *cut * count], dtype=np.float64)

    def _make_order(self, program: Program, count: int, policy: tuple[str, int]) -> NamedOrder:
        cut = self._cut(program, count, policy)
        name = f"nano-{policy[0]}-{policy[1]}-{count}" if count > 1 else "nano-1"
        return NamedOrder(name, (cut,), sequential([cut]))

    def _cut(self, program: Program, count: int, policy: tuple[str, int]) -> Program:
        return program if count == 1 else cut_program(program, count, self._rows, get_policy(*policy)).program

    def _shorten(self, count: int, policy: tuple[str, int]) -> RepeatingSchedule | None:
        """Return a schedule of few layers, which predicts that of all; None if there are only few equal layers."""
        few, more = (keep_few_layers(self._program, kept) for kept in (KEPT_LAYERS, KEPT_LAYERS + 1))
        if few is None or more is None:
            return None
        short, longer = (self._cut(each.program, count, policy) for each in (few, more))
        length = len(longer.ops) - len(short.ops)
        first = sum(count if op.token_wise else 1 for op in few.program.ops[: few.first])
        order = NamedOrder("", (short,), sequential([short]))
        return RepeatingSchedule(order.schedule, first + length, length, few.omitted)


def _keep_best(books: dict[int, OrderBook], steps: Sequence[BatchFeatures]) -> dict[int, OrderBook]:
    """Return few of the books: by each table, each of *steps* takes about as long with these as with all.

    One that cuts is among them, for servers whose settings ask for a cut wherever there can be one.
    """
    ends = {count: _predict_ends(book, count, steps) for count, book in books.items()}
    kept = [min(books)] if books else []
    while len(kept) < min(KEPT_COUNTS, len(books)) and (max(kept) == 1 or _compute_loss(ends, kept) > KEPT_LOSS):
        rest = [count for count in books if count not in kept]
        kept.append(min(rest, key=lambda count: _compute_loss(ends, [*kept, count])))
    return {count: books[count] for count in sorted(kept)}


def _compute_loss(ends: dict[int, Vector], kept: Sequence[int]) -> float:
    """Return the largest share by which a step takes longer with the best of the *kept* numbers than with all."""
    best = np.minimum.reduce([*ends.values()])
    return float((np.minimum.reduce([ends[count] for count in kept]) / best).max()) - 1.0


def _predict_ends(book: OrderBook, count: int, steps: Sequence[BatchFeatures]) -> Vector:
    """Return the seconds of each step in so many nano-batches [tables, steps]; infinity if it has fewer tokens."""
    cuts = [cut_step(features, count) for features in steps]
    possible = [number for number, cut in enumerate(cuts) if cut is not None]
    predicted = book.predict([cut.features for cut in cuts if cut is not None]).min(axis=2)
    ends = np.full((len(predicted), len(cuts)), np.inf)
    ends[:, possible] = predicted
    raised: Vector = np.maximum(ends, SHORTEST_STEP)
    return raised


def divide_measured(program: Program, table: CostTable) -> Program:
    """Return the program with the ops of each divided op in place of it; the program itself if they have no costs.

    Costs that were measured before an op was divided have only those of the whole op, and so have published costs.
    """
    divided = divide_ops(program)
    return divided if all(op.name in table.ops for op in divided.ops) else program


def cut_step(features: BatchFeatures, count: int) -> Cut | None:
    """Return the cut of a step with these features into nano-batches; None if it has fewer tokens than these."""
    if features.tokens < count:
        return None
    sizes = split_evenly(features.tokens, count)
    return Cut(_measure(features, sizes), slice_nano_batches((features.tokens,)), nano_batches=count)


def cut_shared_step(tokens: Sequence[int], count: int) -> Cut | None:
    """Return the cut of a step of data parallel ranks, from the *tokens* of each [ranks]; None if one has too few."""
    sizes = share_nano_batches(tokens, count)
    if isinstance(sizes, Decline):
        return None
    largest = [max(share) for share in sizes]
    return Cut(_measure(BatchFeatures(max(tokens)), largest), sizes=sizes, nano_batches=count)


def _measure(features: BatchFeatures, sizes: Sequence[int]) -> Features:
    return (features, *map(BatchFeatures, sizes)) if len(sizes) > 1 else (features,)
