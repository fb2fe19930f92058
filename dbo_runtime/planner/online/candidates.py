"""Issue orders that are worth a prediction: orders that a search finds, and those of the common policies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.policies import Order, get_policy, keep_layers, keeps_layers
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.online.named_order import COMPARED_PERIODS, NamedOrder, RepeatingSchedule
from dbo_runtime.planner.search.jobs import make_jobs
from dbo_runtime.planner.search.period import PeriodicOrder, PeriodSearch
from dbo_runtime.planner.search.search import find_order

MAX_LEAD_LAYERS = 3  # longest lead of the staggered orders that are tried
MAX_COUNTS = 8  # numbers of micro-batches for which policies are kept
MAX_SEARCHED = 8  # most micro-batches to search for; more are issued by the fastest of the common policies
MAX_SHORT_SEARCH_STATES = 3_000  # states of a search with few layers: more improve no order by more than 0.3 %


class Candidates:
    """Makes issue orders for micro-batches of one program.

    Args:
        program: ops of one micro-batch, on the lanes where they are to run.
        max_states: states that each search may visit; see `search.find_order`.
        keeps_layers: whether to leave out orders in which a micro-batch attends in a layer before all have attended in
            the one before it; see `policies.keeps_layers`.
    """

    def __init__(self, program: Program, max_states: int, keeps_layers: bool = False) -> None:
        self._program = program
        self._keeps_layers = keeps_layers
        self._side_ops = list_side_ops(program)
        self._max_states = max_states
        self._search = PeriodSearch(program)
        self.list_policies = lru_cache(MAX_COUNTS)(self._list_policies)

    def make_policy(self, name: str, lead: int, micro_batches: int, *prefix: str) -> NamedOrder:
        """Make the order of a policy, named after it and *prefix*; see `policies.keep_layers`."""
        if self._keeps_layers:
            name, lead = keep_layers((name, lead))
        policy = get_policy(name, lead)
        periodic = self._search.repeat_policy(policy, micro_batches)
        order = policy((self._program,) * micro_batches)
        if periodic is not None and periodic.repeat(periodic.omitted_periods) != order:
            periodic = None
        words = (*prefix, name, *self._side_ops, str(lead), str(micro_batches))
        return self._make(words, order, periodic, micro_batches)

    def find(self, times: Sequence[Sequence[float]]) -> NamedOrder | None:
        """Find an order that is optimal without contention, or nearly so, if ops take *times* seconds.

        *times* are [micro-batches][ops]. The result is None in three cases:

        - No period is found, and there are more than `MAX_SEARCHED` micro-batches: the time of a search grows with the
          square of their number.
        - No period is found, and no order could be much faster than alternating.
        - The order does not keep layers in turn, but has to.
        """
        periodic = self._search.find(times, min(self._max_states, MAX_SHORT_SEARCH_STATES))
        if periodic is None and (len(times) > MAX_SEARCHED or self._search.is_saturated(times)):
            return None
        if periodic is None:
            order = find_order(make_jobs((self._program,) * len(times), times), self._max_states).order
        else:
            order = periodic.repeat(periodic.omitted_periods)
        if not self._may_serve(order):
            return None
        words = ("optimal", *self._side_ops, str(len(times)), _digest(order))
        return self._make(words, order, periodic, len(times))

    def _list_policies(self, micro_batches: int, leads: int = 1 + MAX_LEAD_LAYERS) -> tuple[NamedOrder, ...]:
        """Return the common policies' orders of so many micro-batches: staggered by 0 to *leads* - 1 segments."""
        first = "alternate" if self._keeps_layers else "staggered"
        names = (first, *("staggered" for _ in range(1, leads)))
        orders = [self.make_policy(name, lead, micro_batches, "optimal") for lead, name in enumerate(names)]
        return tuple(each for each in orders if self._may_serve(each.order))

    def _may_serve(self, order: Order) -> bool:
        return not self._keeps_layers or keeps_layers(self._program.ops[issue.position] for issue in order)

    def _make(
        self, words: Sequence[str], order: Order, periodic: PeriodicOrder | None, micro_batches: int
    ) -> NamedOrder:
        programs = (self._program,) * micro_batches
        repeating = None if periodic is None else self._shorten(periodic, micro_batches)
        return NamedOrder("-".join(words), programs, order, repeating)

    def _shorten(self, periodic: PeriodicOrder, micro_batches: int) -> RepeatingSchedule | None:
        """Return a schedule with just enough periods to see a steady state; None if the order has no more periods."""
        few = self._search.lengthen(periodic, COMPARED_PERIODS)
        if few is None:
            return None
        period = periodic.period
        length = period.end - period.begin
        schedule = lower((few.program,) * micro_batches, periodic.repeat(COMPARED_PERIODS))
        return RepeatingSchedule(schedule, period.begin + length, length, periodic.omitted_periods - COMPARED_PERIODS)


def list_side_ops(program: Program) -> tuple[str, ...]:
    """Return the names of the ops that are on `side`."""
    return tuple(sorted({op.name for op in program.ops if op.lane == SIDE}))


def _digest(order: Order) -> str:
    """Return a short hash of an order's micro-batches: orders of one program differ in nothing else."""
    numbers = [issue.micro_batch for issue in order]
    return hashlib.sha256(str(numbers).encode()).hexdigest()[:8]
