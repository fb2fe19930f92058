"""Issue orders for micro-batches, and the lanes on which a program's ops are best placed, from costs."""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable, HostCost
from dbo_runtime.planner.online.predictor import NamedOrder, Predictor, compute_end
from dbo_runtime.planner.search.jobs import make_jobs
from dbo_runtime.planner.search.search import find_order
from dbo_runtime.policies import Order, alternate, get_policy, staggered
from dbo_runtime.program import SIDE, Program
from dbo_runtime.schedule import lower

ORDER_BUCKETS_PER_OCTAVE = 2  # of an op's share of the time: few orders are needed
MIN_LOG_SHARE = -6.0  # log2 below which shares count as equal
SEQUENTIAL = ("sequential", 0)


class Orders:
    """Finds and caches issue orders: an order that is good for some shares of time is good for steps of any length.

    Args:
        program: of one micro-batch.
        table: the costs of its ops.
        predictor: of steps, by these costs.
        max_states: states that each search may visit; see `search.find_order`.

    Attributes:
        placements: the program with its `side` ops on `compute`, and other placements; see `list_placements`.
        can_use_side: whether there are such ops, and costs that say how lanes that compute slow each other.
    """

    def __init__(self, program: Program, table: CostTable, predictor: Predictor, max_states: int) -> None:
        self.placements = list_placements(program)
        self.can_use_side = SIDE in program.lanes and any(SIDE in name.split("/") for name in table.contention)
        self._host = HostCost(computes=table.host.computes)
        self._predictor = predictor
        self._max_states = max_states
        self._known: dict[tuple[object, ...], tuple[NamedOrder, ...]] = {}

    def list_placements(self, config: RuntimeConfig) -> Sequence[Program]:
        """Return the program with its ops on the lanes that the settings allow and the costs cover."""
        if config.side == "on":
            return self.placements[-1:]
        return self.placements if config.side == "auto" and self.can_use_side else self.placements[:1]

    def choose_best(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> NamedOrder:
        """Return the order for micro-batches like these, on the lanes that are predicted to be fastest."""
        first, *others = self.list_orders(slice_features, config)
        if not others:
            return first
        return min((first, *others), key=lambda ordered: self._predictor.predict_split(ordered, slice_features))

    def list_orders(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> tuple[NamedOrder, ...]:
        """Return the orders for micro-batches like these: that of the settings, or the best for their shares of time.

        If ops may be on `side` there are two: the best without any of them there, and the best with some.
        """
        count = len(slice_features)
        policy = config.policy if count > 1 else SEQUENTIAL  # one micro-batch has one order
        placements = self.list_placements(config)
        each = BatchFeatures(*(sum(values) / count for values in zip(*slice_features, strict=True)))
        is_judged = policy[0] == "optimal" or len(placements) > 1
        shares = self._predictor.measure_shares(each, ORDER_BUCKETS_PER_OCTAVE, MIN_LOG_SHARE) if is_judged else ()
        key = count, policy, config.side, shares
        if key not in self._known:
            figures = [str(figure) for figure in (config.policy[1], count, *map(abs, shares))]
            self._known[key] = tuple(
                NamedOrder(
                    "-".join([config.policy[0], *list_side_ops(program), *figures]), order, lower(programs, order)
                )
                for program in self._pick(placements, count, policy, shares)
                for programs in [(program,) * count]
                for order in [self._search(program, count, policy, shares)]
            )
        return self._known[key]

    def _pick(
        self, placements: Sequence[Program], count: int, policy: tuple[str, int], shares: tuple[int, ...]
    ) -> Sequence[Program]:
        """Return the first placement, and of the others the best one under the policy."""
        if len(placements) <= 2:
            return placements
        apply_policy = get_policy(*policy)

        def judge(program: Program) -> float:
            return self._judge(program, apply_policy((program,) * count), shares)

        return placements[0], min(placements[1:], key=judge)

    def _search(self, program: Program, count: int, policy: tuple[str, int], shares: tuple[int, ...]) -> Order:
        """Return the best order: the optimum without contention or a common policy, compared with contention."""
        programs = (program,) * count
        if policy[0] != "optimal":
            return get_policy(*policy)(programs)
        best = find_order(make_jobs(programs, [self._restore_times(shares)] * count), self._max_states)
        candidates = (best.order, alternate(programs), staggered(programs, 1))
        return min(candidates, key=lambda order: self._judge(program, order, shares))

    def _judge(self, program: Program, order: Order, shares: tuple[int, ...]) -> float:
        """Return when micro-batches with such shares of time end; the unit is arbitrary."""
        count = 1 + max(issue.micro_batch for issue in order)
        times = [self._restore_times(shares)] * count
        return compute_end(self._predictor.simulate_times(lower((program,) * count, order), times, self._host))

    def _restore_times(self, shares: tuple[int, ...]) -> list[float]:
        return self._predictor.restore_times(shares, ORDER_BUCKETS_PER_OCTAVE)


def list_placements(program: Program) -> tuple[Program, ...]:
    """Return *program* with its `side` ops on `compute`, with each kind of them alone on `side`, and with all."""
    kinds = dict.fromkeys(op.name for op in program.ops if op.lane == SIDE)
    alone = [program.fold_side(kind) for kind in kinds] if len(kinds) > 1 else []
    return (program.fold_side(), *alone, program) if kinds else (program,)


def list_side_ops(program: Program) -> tuple[str, ...]:
    """Return the names of the ops that are on `side`."""
    return tuple(sorted({op.name for op in program.ops if op.lane == SIDE}))
