"""Whether to split a step, into how many micro-batches, where, in which issue order, and on which lanes: from costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dbo_runtime.batch import Batch, BatchSlice, list_shares, place_cuts, share_evenly, slice_batch
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost
from dbo_runtime.planner.online.candidates import list_side_ops
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT, Correction
from dbo_runtime.planner.online.cuts import CostSums, balance_targets, compute_density, measure_slices
from dbo_runtime.planner.online.hysteresis import Prediction, compute_gain
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.orders import Orders
from dbo_runtime.planner.online.predictor import MAX_SIMULATED, Predictor, get_uncertainty, make_worst_cases
from dbo_runtime.planner.online.probation import Kind
from dbo_runtime.planner.online.selection import Selection, decline_unpaid
from dbo_runtime.planner.online.split_choice import SplitChoice

MAX_MICRO_BATCHES = 3  # that `auto` tries: more add little if phases match, and each pays the fixed costs
ONLINE_SEARCH_STATES = 40_000  # of the search for an order while a step waits: about a second
MAX_REMEMBERED_BATCHES = 4096  # batches whose decision is kept


class Planner:
    """Plans steps of one model from its costs.

    Decisions depend only on the batches that were asked about and on the corrections that were applied: ranks with the
    same costs that are asked the same decide the same.

    Args:
        program: of one micro-batch. Its `side` ops run on `side` only if that is predicted to pay.
        table: the costs of its ops. If it has no contention of lanes that compute, `auto` leaves all of them on
            `compute`.
        max_states: states that the search for an order may visit; see `search.find_order`.
        keeps_layers: whether no micro-batch may attend in a layer before all have in the one before it.
    """

    def __init__(
        self,
        program: Program,
        table: CostTable,
        max_states: int = ONLINE_SEARCH_STATES,
        keeps_layers: bool = False,
    ) -> None:
        self.program = program
        self.table = table
        self.correction = Correction()
        self._selection = Selection(self.correction)
        self.probation = self._selection.probation
        self._predictor = Predictor(program, table)
        worst_tables = make_worst_cases(table, get_uncertainty(table))
        self._worst_cases = [Predictor(program, worst_case) for worst_case in worst_tables]
        self._density = compute_density(table, program)
        self._counts = Counter(op.name for op in program.ops)
        self._orders = Orders(program, table, self._predictor, max_states, keeps_layers)
        self._decisions: BoundedDict[tuple[Batch | tuple[int, ...], RuntimeConfig], SplitChoice | Decline] = (
            BoundedDict(MAX_REMEMBERED_BATCHES)
        )
        self._too_small: BoundedDict[int, Decline | None] = BoundedDict(MAX_REMEMBERED_BATCHES)

    @property
    def unsplit_program(self) -> Program:
        """The program of an unsplit step: as models run it, without a `side` lane."""
        return self._orders.placements[0]

    @property
    def can_use_side(self) -> bool:
        """Whether there are ops for `side`, and contention of lanes that compute."""
        return self._orders.can_use_side

    def decline_early(self, tokens: int) -> Decline | None:
        """Return why no step of *tokens* tokens can gain; None if its requests have to be considered.

        None can if all communication, and what attention saves by not masking, is less than the fixed costs that the
        compute lane pays per micro-batch; unless a `side` lane may gain without any cut.
        """
        if self.can_use_side:
            return None
        if tokens not in self._too_small:
            self._too_small[tokens] = self._judge_size(tokens)
        return self._too_small[tokens]

    def choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how to split *batch*, or why not; `mode` and `margin` of the settings decide.

        Decisions are cached until the correction changes, but for those of `Probation`.
        """
        known = self._decisions.get((batch, config))
        decision = self._remember(batch, config, self._choose(batch, config)) if known is None else known
        return self._selection.check_measured(decision, config)

    def choose_data_parallel(self, tokens: Sequence[int], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how all data parallel ranks split a step, from the *tokens* of each [ranks].

        The others wait for the slowest rank, so the largest number of tokens counts. Contexts and lengths of requests
        of other ranks are not known, and attention to them is left out.
        """
        key = tuple(tokens)
        if (key, config) in self._decisions:
            return self._selection.check_measured(self._decisions[key, config], config)
        features = BatchFeatures(max(tokens))
        options = []
        for sizes in list_shares(tokens, self.list_parts(config)):
            slice_features = [BatchFeatures(max(part)) for part in sizes]
            options.extend(self._make_choices(features, slice_features, config, sizes=sizes))
        decision = self._remember(key, config, self._selection.decide(options, features, config))
        return self._selection.check_measured(decision, config)

    @property
    def orders(self) -> Sequence[NamedOrder]:
        """The orders that are prepared: none, for this planner searches when it is asked."""
        return ()

    def prepare(self, config: RuntimeConfig) -> None:
        """Do under these settings, before steps are planned, what takes long: nothing here."""

    def forget(self) -> None:
        """Forget what measured steps taught; what was found without them stays."""
        self.correction = Correction()
        self._selection = Selection(self.correction)
        self.probation = self._selection.probation
        self._decisions.clear()

    def describe_caches(self) -> dict[str, tuple[int, int]]:
        """Return how many entries each cache has, and how many it may have."""
        caches: dict[str, BoundedDict[Any, Any]] = {
            "decisions": self._decisions,
            "sizes": self._too_small,
            **self._orders.caches,
        }
        worst = [len(predictor.simulated) for predictor in self._worst_cases]
        return {
            **{name: (len(cache), cache.max_size) for name, cache in caches.items()},
            "worst cases": (sum(worst), len(worst) * MAX_SIMULATED),
            **self._selection.caches,
        }

    def list_parts(self, config: RuntimeConfig) -> Sequence[int]:
        """Return the numbers of micro-batches to choose from; also one, if its ops may run concurrently on `side`."""
        parts = list_parts(config)
        return (1, *parts) if self._orders.list_placements(config)[-1] is not self.unsplit_program else parts

    def predict_unsplit(self, features: BatchFeatures) -> float:
        """Return the seconds of an unsplit step."""
        return self._predictor.predict_unsplit(features) * self.correction.factor(UNSPLIT)

    def predict_split(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> float:
        """Return the seconds of a step split into micro-batches with these features."""
        ordered = self._orders.choose_best(slice_features, config)
        return self._predictor.predict_split(ordered, slice_features) * self.correction.factor(SPLIT)

    def draw_timeline(self, schedule: Schedule, slice_features: Sequence[BatchFeatures]) -> Timeline:
        """Return when each op would run in a step split into micro-batches with these features."""
        return self._predictor.simulate(schedule, slice_features)

    def get_schedule(self, slice_features: Sequence[BatchFeatures], config: RuntimeConfig) -> Schedule:
        """Return the schedule of a step split into micro-batches with these features."""
        return self._orders.choose_best(slice_features, config).schedule

    def observe(self, mode: str, predicted: float, measured: float, kind: Kind | None = None) -> None:
        """Learn from a step: *predicted* with the present correction, and *measured*, in seconds."""
        uncorrected = predicted / self.correction.factor(mode)
        self.correction.observe(mode, uncorrected, measured)
        if kind is not None:
            self.probation.observe(kind, mode, uncorrected, measured)

    def correct(self, proposals: Sequence[dict[str, float]]) -> None:
        """Apply the proposals of all ranks, and forget cached decisions."""
        self.correction.apply(proposals)
        self._decisions.clear()

    def _remember(
        self, key: Batch | tuple[int, ...], config: RuntimeConfig, decision: SplitChoice | Decline
    ) -> SplitChoice | Decline:
        self._decisions[key, config] = decision
        return decision

    def _judge_size(self, tokens: int) -> Decline | None:
        features = BatchFeatures(tokens)
        costs = [(self.table.ops[name], count) for name, count in self._counts.items()]
        hidden = sum(count * cost.time(features) for cost, count in costs if isinstance(cost, CommCost))
        # What is new in one micro-batch is context in another.
        cheaper = max(self._density.pair - self._density.context_pair, 0.0)
        hidden += cheaper * tokens**2 / 2
        paid = sum(count * cost.fixed for cost, count in costs if isinstance(cost, ComputeCost))  # others may be hidden
        paid += self.table.host.split - self.table.host.unsplit
        if hidden >= paid:
            return None
        figures = f"at most {hidden * 1e3:.2f} ms to hide, and splitting costs at least {paid * 1e3:.2f} ms"
        return Decline("no gain predicted", f"{tokens} tokens have {figures}")

    def _choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        (features,) = measure_slices(batch, slice_batch(batch, ()))
        parts: Sequence[int] = self.list_parts(config)
        if not batch.prefill_tokens and config.mode == "auto":
            declined = self._decline_decode(features, config)
            if declined is not None:
                if 1 not in parts:
                    return declined
                parts = (1,)
        options = [
            choice
            for slices in self._list_cuts(batch, parts)
            for choice in self._make_choices(features, measure_slices(batch, slices), config, slices=slices)
        ]
        return self._selection.decide(options, features, config)

    def _decline_decode(self, features: BatchFeatures, config: RuntimeConfig) -> Decline | None:
        """Return why an even split of decodes does not pay: they are frequent and short, so it is tried first."""
        parts = list_parts(config)[0]
        if features.tokens < parts:
            return None
        evenly = [BatchFeatures(features.tokens // parts, *(amount / parts for amount in features[1:]))] * parts
        prediction = self._predict(self._orders.choose_best(evenly, config), features, evenly)
        return None if prediction.gain > 0 else decline_unpaid(prediction, config)

    def _list_cuts(self, batch: Batch, parts: Sequence[int]) -> list[tuple[BatchSlice, ...]]:
        """Return the cuts to predict: even by tokens, and even by cost."""
        sums = CostSums(batch, self._density)
        cuts = dict.fromkeys(
            place_cuts(batch, targets)
            for count in parts
            for targets in (share_evenly(batch, count), balance_targets(sums, count))
        )
        return [slice_batch(batch, cut) for cut in cuts if cut or 1 in parts]

    def _make_choices(
        self,
        features: BatchFeatures,
        slice_features: Sequence[BatchFeatures],
        config: RuntimeConfig,
        slices: tuple[BatchSlice, ...] = (),
        sizes: tuple[tuple[int, ...], ...] = (),
    ) -> list[SplitChoice]:
        orders = self._orders.list_orders(slice_features, config)
        return [
            SplitChoice(ordered, self._predict(ordered, features, slice_features), slices, sizes) for ordered in orders
        ]

    def _predict(
        self, ordered: NamedOrder, features: BatchFeatures, slice_features: Sequence[BatchFeatures]
    ) -> Prediction:
        factors = self.correction.factor(UNSPLIT), self.correction.factor(SPLIT)

        def predict(predictor: Predictor) -> tuple[float, float]:
            unsplit, split = predictor.predict_unsplit(features), predictor.predict_split(ordered, slice_features)
            return unsplit * factors[0], split * factors[1]

        unsplit, split = predict(self._predictor)
        longer = compute_gain(unsplit, split * (1 + self.table.split_error))
        worst_case = min(longer, *(compute_gain(*predict(predictor)) for predictor in self._worst_cases))
        return Prediction(unsplit, split, len(slice_features), worst_case, list_side_ops(ordered.programs[0]))


def list_parts(config: RuntimeConfig) -> Sequence[int]:
    """Return the numbers of micro-batches to choose from."""
    return range(2, MAX_MICRO_BATCHES + 1) if config.micro_batches is None else (config.micro_batches,)
