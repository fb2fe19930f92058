"""Find the fastest issue order for given micro-batches, by a search for each bucket of features."""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.placements import Placements, is_moved
from dbo_runtime.planner.online.predictor import BUCKETS_PER_OCTAVE, Bucket, Predictor, compute_midpoint, get_bucket

SEQUENTIAL = ("sequential", 0)
MAX_FOUND = 256  # number of orders that are kept


class Orders:
    """Finds and caches issue orders: the fastest known for micro-batches with given features.

    The result depends only on program, costs and features. So ranks that ask for the same get the same.

    Args:
        program: ops of one micro-batch.
        table: costs of the ops.
        predictor: predicts steps by these costs.
        max_states: states that each search may visit; see `search.find_order`.
        keeps_layers: see `Candidates`.

    Attributes:
        placements: program by each placement, first without `side`; see `list_placements`.
    """

    def __init__(
        self, program: Program, table: CostTable, predictor: Predictor, max_states: int, keeps_layers: bool = False
    ) -> None:
        self._placements = Placements(program, table)
        self.placements = self._placements.programs
        self._program = program
        self._table = table
        self._predictor = predictor
        self._candidates = [Candidates(program, max_states, keeps_layers) for program in self.placements]
        self._found: BoundedDict[tuple[int, tuple[Bucket, ...]], NamedOrder | None] = BoundedDict(MAX_FOUND)
        self._policies: BoundedDict[tuple[int, int, tuple[str, int]], NamedOrder] = BoundedDict(MAX_FOUND)

    def choose_best(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> NamedOrder:
        """Return the order for micro-batches like these that is predicted to be fastest, on any lanes."""
        return self._choose(self.list_orders(slice_features, config), slice_features)

    def list_orders(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> tuple[NamedOrder, ...]:
        """Return the orders for micro-batches like these: those of the settings' policy, or the fastest that are known.

        If ops may be on `side`, there are two: the best without ops on `side`, and the best with some. There is a third
        if further ops may move there.
        """
        placements = self._pick(slice_features, config)
        if config.policy[0] != "optimal" or len(slice_features) == 1:
            return tuple(self._get_policy(number, slice_features, config) for number in placements)
        return tuple(self._choose_searched(number, slice_features) for number in placements)

    def _pick(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> Sequence[int]:
        """Return the first placement, the best of the others under the policy, and the one with moved ops."""
        first, *others = self._placements.list_allowed(config)
        if len(others) <= 1:
            return (first, *others)
        orders = {number: self._get_policy(number, slice_features, config) for number in others}
        best = min(others, key=lambda number: self._predictor.predict_split(orders[number], slice_features))
        return first, best, *(number for number in others if number != best and is_moved(self.placements[number]))

    def _get_policy(self, number: int, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> NamedOrder:
        """Return the order of the policy that the settings name. One micro-batch has only one order."""
        count = len(slice_features)
        policy = config.policy if count > 1 else SEQUENTIAL
        key = number, count, policy
        if key not in self._policies:
            self._policies[key] = self._candidates[number].make_policy(*policy, count)
        return self._policies[key]

    def _choose_searched(self, number: int, slice_features: Sequence[BatchFeatures]) -> NamedOrder:
        """Return the fastest order: a common policy's, or one that a search finds, which leaves out contention."""
        shape = tuple(get_bucket(features, BUCKETS_PER_OCTAVE) for features in slice_features)
        candidates, key = self._candidates[number], (number, shape)
        if key not in self._found:
            middles = [compute_midpoint(bucket, BUCKETS_PER_OCTAVE) for bucket in shape]
            self._found[key] = candidates.find([self._table.times(self._program, middle) for middle in middles])
        found, policies = self._found[key], candidates.list_policies(len(slice_features))
        return self._choose(policies if found is None else (found, *policies), slice_features)

    def _choose(self, orders: Sequence[NamedOrder], slice_features: Sequence[BatchFeatures]) -> NamedOrder:
        """Return the fastest order; if several are equally fast, the first of them."""
        if len(orders) == 1:
            return orders[0]
        return min(orders, key=lambda ordered: self._predictor.predict_split(ordered, slice_features))
