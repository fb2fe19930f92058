"""Decide each step by a search and a simulation of its own: slow, but an independent check of the planner.

Orders and predictions are independent of the planner's. Cuts, the selection among predictions, and the memory of
measured steps are the planner's own code.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.oracle.orders import Orders
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.candidates import list_side_ops
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.cuts import Cut, compute_density, list_cuts, list_shared_cuts, measure_slices
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.placements import Placements
from dbo_runtime.planner.online.planner import SEARCH_STATES, list_counts
from dbo_runtime.planner.online.prediction import Prediction, compute_gain
from dbo_runtime.planner.online.predictor import Predictor, get_uncertainty, make_worst_cases
from dbo_runtime.planner.online.selection import select
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.online.step_memory import StepMemory


class SearchingPlanner:
    """Plans each step by a search of its own.

    Args:
        program: ops of one micro-batch.
        table: costs of the ops.
        max_states: states that each search for an order may visit; see `search.find_order`.
        keeps_layers: whether no micro-batch may attend in a layer before all have attended in the one before it.

    Attributes:
        memory: measurements of classes of steps.
    """

    def __init__(
        self, program: Program, table: CostTable, max_states: int = SEARCH_STATES, keeps_layers: bool = False
    ) -> None:
        self.table = table
        self.memory = StepMemory()
        self._predictor = Predictor(program, table)
        self._worst_cases = [Predictor(program, each) for each in make_worst_cases(table, get_uncertainty(table))]
        self._density = compute_density(table, program)
        self._placements = Placements(program, table)
        self._orders = Orders(program, table, self._predictor, max_states, keeps_layers)

    def choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how to split *batch*, or why not; `mode` and `margin` of the settings decide."""
        (features,) = measure_slices(batch, slice_batch(batch, ()))
        return self._select(features, list_cuts(batch, list_counts(config, self._placements), self._density), config)

    def choose_data_parallel(self, tokens: Sequence[int], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how all data parallel ranks split a step, or why not, from the number of *tokens* of each [ranks]."""
        cuts = list_shared_cuts(tokens, list_counts(config, self._placements))
        return self._select(BatchFeatures(max(tokens)), cuts, config)

    def predict_unsplit(self, features: BatchFeatures) -> float:
        """Return the seconds of an unsplit step."""
        return self._predictor.predict_unsplit(features)

    def predict_split(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> float:
        """Return the seconds of a step that is split into micro-batches with these features, by the best order."""
        return self._predictor.predict_split(self._orders.choose_best(slice_features, config), slice_features)

    def _select(self, features: BatchFeatures, cuts: Sequence[Cut], config: RuntimeConfig) -> SplitChoice | Decline:
        options = [
            SplitChoice(order, self._predict(order, features, cut.features), cut)
            for cut in cuts
            for order in self._orders.list_orders(cut.features, config)
        ]
        return self.memory.check_measured(select(options, features, config, self.memory), config)

    def _predict(
        self, ordered: NamedOrder, features: BatchFeatures, slice_features: Sequence[BatchFeatures]
    ) -> Prediction:
        factor = self.memory.correction.factor

        def predict(predictor: Predictor) -> tuple[float, float]:
            unsplit, split = predictor.predict_unsplit(features), predictor.predict_split(ordered, slice_features)
            return unsplit * factor(UNSPLIT), split * factor(SPLIT)

        unsplit, split = predict(self._predictor)
        longer = compute_gain(unsplit, split * (1 + self.table.split_error))
        worst_case = min(longer, *(compute_gain(*predict(predictor)) for predictor in self._worst_cases))
        return Prediction(unsplit, split, len(slice_features), worst_case, list_side_ops(ordered.programs[0]))
