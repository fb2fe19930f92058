"""Prepare the issue orders that serving chooses from. Search where known orders may be far from the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.critical_paths import CriticalPaths, list_different
from dbo_runtime.planner.online.durations import DurationLayout, DurationTables, Vector, stack_features
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.order_book import OrderBook, PreparedOrder
from dbo_runtime.planner.online.placements import is_moved
from dbo_runtime.planner.online.predictor import Predictor

SEQUENTIAL = ("sequential", 0)
PREPARED_LEADS = 2  # number of leads of the prepared staggered orders; searches find orders with longer leads
MAX_SEARCHES = 4  # searches for each number of micro-batches, all placements together
COMPARED_SAMPLES = 4  # samples that tell which placement is best
SEARCHED_GAP = 0.01  # search for a step if it takes longer than its lower bound by more than this share
USEFUL_GAIN = 1e-3  # an order is kept if it saves this share of some step's time
UNEVEN_SHARES = (0.03, 0.3)  # time of a small micro-batch, as a share of the time of a large one
UNEVEN_STRIDE = 4  # one in so many samples is also taken as a step that is cut unevenly
SHORTEST_STEP = 1e-12  # seconds of a step, at least, so that steps whose ops cost nothing have ratios

Samples = Sequence[Sequence[BatchFeatures]]
"""Features of each micro-batch, for steps that represent all steps [steps][micro-batches]."""


class Preparation:
    """Prepares the issue orders of one program.

    Args:
        placements: program by each placement, first without `side`; see `list_placements`.
        tables: costs to predict by, the expected ones first.
        max_states: states that each search may visit.
        keeps_layers: see `Candidates`.
    """

    def __init__(
        self, placements: Sequence[Program], tables: DurationTables, max_states: int, keeps_layers: bool = False
    ) -> None:
        self._placements = placements
        self._tables = tables
        self._candidates = [Candidates(program, max_states, keeps_layers) for program in placements]

    def make_book(self, samples: Samples, allowed: Sequence[int], config: RuntimeConfig) -> OrderBook:
        """Make the book of the orders for steps like *samples*.

        Orders follow the policy of the settings; with `optimal`, they come from the common policies and from searches.
        *allowed* are the numbers of the placements to choose from. Orders are prepared for the first of them, for the
        best of the others, and for those with moved ops.
        """
        steps = _Steps(self._placements[0], self._tables, samples)
        chosen = self._choose_placements(allowed, steps, config)
        if config.policy[0] != "optimal" or steps.micro_batches == 1:
            options = [steps.prepare(self._make_policy(number, steps.micro_batches, config)) for number in chosen]
        else:
            searches = max(MAX_SEARCHES // len(chosen), 1)
            options = [option for number in chosen for option in self._search(number, steps, searches)]
        return OrderBook(self._placements[-1], [option.prepared for option in options], self._tables, samples)

    def make_nano_book(self, samples: Samples, order: NamedOrder, counts: Vector) -> OrderBook:
        """Make the book of an order in nano-batches, for steps like *samples*.

        *samples* have the features of the step, and then those of each nano-batch. *counts* are the numbers of ops with
        each of them; see `OrderBook`.
        """
        steps = _Steps(self._placements[0], self._tables, samples, has_uneven=False)
        return OrderBook(self._placements[0], [steps.prepare(order).prepared], self._tables, samples, counts)

    def estimate(self, samples: Samples, order: NamedOrder) -> float:
        """Return how long steps like *samples* take by an order, as a sum of logarithms over a few of them."""
        return _Steps(self._placements[0], self._tables, samples, has_uneven=False).estimate(order)

    def _choose_placements(self, allowed: Sequence[int], steps: _Steps, config: RuntimeConfig) -> list[int]:
        """Return the first placement, the best of the others under the policy, and those with moved ops."""
        first, *others = allowed
        if len(others) <= 1:
            return [first, *others]
        orders = {number: self._make_policy(number, steps.micro_batches, config) for number in others}
        best = min(others, key=lambda number: steps.estimate(orders[number]))
        moved = [number for number in others if number != best and is_moved(self._placements[number])]
        return [first, best, *moved]

    def _make_policy(self, number: int, micro_batches: int, config: RuntimeConfig) -> NamedOrder:
        policy = config.policy if micro_batches > 1 else SEQUENTIAL
        return self._candidates[number].make_policy(*policy, micro_batches)

    def _search(self, number: int, steps: _Steps, searches: int) -> list[_Option]:
        """Return the useful orders of one placement, out of the common policies' and those that searches find.

        Each search is for the sample whose best known order is farthest from a lower bound.
        """
        candidates, program = self._candidates[number], self._placements[number]
        policies = candidates.list_policies(steps.micro_batches, PREPARED_LEADS)
        options = [steps.prepare(order) for order in policies]
        names = {option.prepared.order.name for option in options}
        bounds = steps.estimate_bounds(program)
        for _ in range(searches):
            gaps = np.min([option.ends for option in options], axis=0) / bounds - 1.0
            if gaps.max() <= SEARCHED_GAP:
                break
            sample = int(gaps.argmax())
            bounds[sample] = np.inf  # so that it is searched for only once
            found = candidates.find(steps.compute_times(program, sample))
            if found is not None and found.name not in names:
                names.add(found.name)
                options.append(steps.prepare(found))
        return list_useful(options)


class _Option(NamedTuple):
    """An order, and the seconds at which it ends for each sample, without contention [samples]."""

    prepared: PreparedOrder
    ends: Vector


class _Steps:
    """The samples, with the durations of their ops."""

    def __init__(self, program: Program, tables: DurationTables, samples: Samples, has_uneven: bool = True) -> None:
        self.micro_batches = len(samples[0])
        self._samples = samples
        self._tables = tables
        self._layout = DurationLayout(program, self.micro_batches)
        durations = tables.compute_durations(stack_features(samples))
        uneven = self._make_uneven(durations[0, ::UNEVEN_STRIDE]) if has_uneven else ()
        self._durations = np.concatenate([durations[0], durations[-1], *uneven])  # expected costs, and a worst case
        self._work = tables.compute_work(durations[0])
        self._predictor = Predictor(program, tables.tables[0])

    def prepare(self, order: NamedOrder) -> _Option:
        """Find the critical paths of an order."""
        host = self._tables.tables[0].host
        ends, paths = CriticalPaths(order.schedule, self._layout, host.computes).find(self._durations)
        ends = np.maximum(ends[: len(self._samples)], SHORTEST_STEP)
        return _Option(PreparedOrder(order, list_different(paths)), ends)

    def _make_uneven(self, durations: Vector) -> Iterator[Vector]:
        """Yield *durations* of steps with one small or one large micro-batch: requests may allow no other cut."""
        if self.micro_batches == 1:
            return
        kinds = len(self._layout.names)
        for micro_batch, share in product(range(self.micro_batches), UNEVEN_SHARES):
            own = slice(micro_batch * kinds, (micro_batch + 1) * kinds)
            small, large = np.ones(self._layout.size), np.ones(self._layout.size)
            small[own] = share
            large[: self.micro_batches * kinds] = share
            large[own] = 1.0
            yield from (durations * small, durations * large)

    def estimate(self, order: NamedOrder) -> float:
        """Return how long steps take by an order, as a sum of logarithms over a few samples."""
        few = self._samples[:: max(len(self._samples) // COMPARED_SAMPLES, 1)]
        return sum(math.log(max(self._predictor.simulate_end(order, features), SHORTEST_STEP)) for features in few)

    def estimate_bounds(self, program: Program) -> Vector:
        """Return the seconds of the busiest lane, or of one micro-batch alone: hardly any order is faster [samples]."""
        lanes = {op.name: op.lane for op in program.ops}
        lane_of = np.array([lanes[name] for name in self._layout.names] * self.micro_batches)
        on_lanes = [self._work[:, lane_of == lane].sum(axis=1) for lane in program.lanes]
        alone = self._work.reshape(len(self._samples), self.micro_batches, -1).sum(axis=2).max(axis=1)
        bounds: Vector = np.max([*on_lanes, alone], axis=0)
        return np.maximum(bounds, SHORTEST_STEP)

    def compute_times(self, program: Program, sample: int) -> list[list[float]]:
        """Return the expected seconds of each op [micro-batches][ops]."""
        return [self._tables.tables[0].times(program, features) for features in self._samples[sample]]


def list_useful(options: Sequence[_Option]) -> list[_Option]:
    """Return a few options that are enough: no sample takes noticeably longer by them than by the best of all."""
    best = np.min([option.ends for option in options], axis=0)
    rest = sorted(options, key=lambda option: sum(map(math.log, option.ends)))
    kept = [rest.pop(0)]
    while rest:
        now = np.min([option.ends for option in kept], axis=0)
        if float((now / best).max()) <= 1.0 + USEFUL_GAIN:
            break
        next_one = max(rest, key=lambda option: float((now / np.minimum(now, option.ends)).max()))
        rest.remove(next_one)
        kept.append(next_one)
    return kept
