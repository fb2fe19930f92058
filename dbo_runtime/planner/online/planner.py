"""Whether to split a step, into how many micro-batches, where, in which issue order, and on which lanes: from costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dbo_runtime.batch import Batch, BatchSlice, place_cuts, share_data_parallel, share_evenly, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, CostTable
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT, Correction
from dbo_runtime.planner.online.cuts import balance_targets, compute_density, measure_slices
from dbo_runtime.planner.online.hysteresis import Prediction, SplitHysteresis, compute_gain
from dbo_runtime.planner.online.orders import Orders, list_side_ops
from dbo_runtime.planner.online.predictor import FINE, NamedOrder, Predictor, get_bucket, make_worst_cases
from dbo_runtime.program import SIDE, Program
from dbo_runtime.schedule import Schedule

MOST_MICRO_BATCHES = 3  # that `auto` tries: more add little where phases match, and pay every fixed cost again
MOST_STATES = 40_000  # of the search while a step waits for its plan: about a second
DEFAULT_UNCERTAINTY = 0.2  # by which share costs may be off that do not say it of themselves
MAX_UNCERTAINTY = 0.3  # and at most
REMEMBERED = 4096  # batches whose decision is kept


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """How to split a step.

    Attributes:
        order: the issue order.
        prediction: of the step's time.
        slices: one per micro-batch; empty where data parallel ranks share a step and each has slices of its own.
        sizes: tokens of every data parallel rank in each micro-batch [micro-batches][ranks]; empty without such ranks.
    """

    order: NamedOrder
    prediction: Prediction
    slices: tuple[BatchSlice, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()


class Planner:
    """Plans steps of one model from its costs.

    A pure function of the batches it is asked about and of the corrections it is given: ranks that hold the same
    costs, and are asked the same, decide alike.

    Args:
        program: of one micro-batch. Its ops on `side` are there only where that is predicted to pay.
        table: the costs of its ops. Where it does not say how lanes that compute slow each other, `auto` leaves all of
            them on `compute`.
        most_states: what the search for an order may look at; see `search.find_order`.
    """

    def __init__(self, program: Program, table: CostTable, most_states: int = MOST_STATES) -> None:
        self.program = program
        self.table = table
        self.correction = Correction()
        self._predictor = Predictor(program, table)
        doubted = make_worst_cases(table, get_uncertainty(table))
        self._worst_cases = [Predictor(program, worst_case) for worst_case in doubted]
        self._gate = SplitHysteresis()
        self._density = compute_density(table, program)
        self._orders = Orders(program, table, self._predictor, most_states)
        self._decisions: dict[tuple[Batch | tuple[int, ...], RuntimeConfig], SplitChoice | Decline] = {}
        self._too_small: dict[int, Decline | None] = {}

    @property
    def plain(self) -> Program:
        """The program as models run by themselves: without a `side` lane."""
        return self._orders.placements[0]

    @property
    def knows_side(self) -> bool:
        """Whether there are ops for `side`, and costs that say how lanes that compute slow each other."""
        return self._orders.knows_side

    def decline_early(self, tokens: int) -> Decline | None:
        """Return why a step of *tokens* tokens is not worth a look at what is in it, if it is not.

        It is not if all its communication, and what attention saves where it does not mask, is less than what the
        compute lane pays again for every micro-batch; unless a `side` lane may save something without any cut.
        """
        if self.knows_side:
            return None
        if tokens not in self._too_small:
            self._too_small[tokens] = self._judge_size(tokens)
        return self._too_small[tokens]

    def choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how to split *batch*, or why not; `mode` and `margin` of the settings decide.

        A batch that was seen before is decided at once, as long as the correction stays what it was.
        """
        known = self._decisions.get((batch, config))
        return self._remember(batch, config, self._choose(batch, config)) if known is None else known

    def choose_data_parallel(self, tokens: Sequence[int], config: RuntimeConfig) -> SplitChoice | Decline:
        """Return how all data parallel ranks split a step: *tokens* of each [ranks] are all they know of each other.

        The slowest rank keeps the others waiting, so the largest load counts. Contexts and the lengths of requests are
        not known, and attention to them is left out.
        """
        key = tuple(tokens)
        if (key, config) in self._decisions:
            return self._decisions[key, config]
        load = BatchFeatures(max(tokens))
        options = []
        for parts in self.list_parts(config):
            sizes = share_data_parallel(tokens, parts)
            if not isinstance(sizes, Decline):
                loads = [BatchFeatures(max(part)) for part in sizes]
                options.extend(self._make_choices(load, loads, config, sizes=sizes))
        return self._remember(key, config, self._decide(options, load, config))

    def list_parts(self, config: RuntimeConfig) -> Sequence[int]:
        """Return the numbers of micro-batches to choose from; one, too, where ops of it may be on a lane beside."""
        parts = list_parts(config)
        return (1, *parts) if self._orders.list_placements(config)[-1] is not self.plain else parts

    def predict_unsplit(self, load: BatchFeatures) -> float:
        """Return the seconds of a step that is not split."""
        return self._predictor.predict_unsplit(load) * self.correction.factor(UNSPLIT)

    def predict_split(self, loads: Sequence[BatchFeatures], config: RuntimeConfig) -> float:
        """Return the seconds of a step split into micro-batches of these loads."""
        ordered = self._orders.choose_best(loads, config)
        return self._predictor.predict_split(ordered, loads) * self.correction.factor(SPLIT)

    def draw_timeline(self, schedule: Schedule, loads: Sequence[BatchFeatures]) -> Timeline:
        """Return when each op would run in a step split into micro-batches of these loads."""
        return self._predictor.simulate(schedule, loads)

    def find_schedule(self, loads: Sequence[BatchFeatures], config: RuntimeConfig) -> Schedule:
        """Return the schedule of a step split into micro-batches of these loads."""
        return self._orders.choose_best(loads, config).schedule

    def note(self, way: str, predicted: float, measured: float) -> None:
        """Learn from a step: *predicted* with the correction of now, and *measured*, in seconds."""
        self.correction.note(way, predicted / self.correction.factor(way), measured)

    def correct(self, proposals: Sequence[dict[str, float]]) -> None:
        """Apply what all ranks propose; decisions are made anew."""
        self.correction.apply(proposals)
        self._decisions.clear()

    def _remember(
        self, key: Batch | tuple[int, ...], config: RuntimeConfig, decision: SplitChoice | Decline
    ) -> SplitChoice | Decline:
        if len(self._decisions) >= REMEMBERED:
            self._decisions.clear()
        self._decisions[key, config] = decision
        return decision

    def _judge_size(self, tokens: int) -> Decline | None:
        load = BatchFeatures(tokens)
        costs = [self.table.ops[op.name] for op in self.program.ops]
        hidden = sum(cost.time(load) for cost in costs if isinstance(cost, CommCost))
        cheaper = max(self._density.pair - self._density.context_pair, 0.0)  # what was new to one is context to another
        hidden += cheaper * tokens**2 / 2
        again = sum(cost.fixed for cost in costs if isinstance(cost, ComputeCost))  # what else is paid again may hide
        again += self.table.host.split - self.table.host.whole
        if hidden >= again:
            return None
        figures = f"at most {hidden * 1e3:.2f} ms to hide, and splitting costs at least {again * 1e3:.2f} ms"
        return Decline("no gain predicted", f"{tokens} tokens have {figures}")

    def _choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice | Decline:
        (load,) = measure_slices(batch, slice_batch(batch, ()))
        parts: Sequence[int] = self.list_parts(config)
        if not batch.prefill_tokens and config.mode == "auto":
            hopeless = self._decline_decode(load, config)
            if hopeless is not None:
                if 1 not in parts:
                    return hopeless
                parts = (1,)
        options = [
            choice
            for slices in self._find_options(batch, parts)
            for choice in self._make_choices(load, measure_slices(batch, slices), config, slices=slices)
        ]
        return self._decide(options, load, config)

    def _decline_decode(self, load: BatchFeatures, config: RuntimeConfig) -> Decline | None:
        """Return why not even an even split would pay. Decodes are frequent and short, and rarely worth their cuts."""
        parts = list_parts(config)[0]
        if load.tokens < parts:
            return None
        even = [BatchFeatures(load.tokens // parts, *(amount / parts for amount in load[1:]))] * parts
        prediction = self._predict(self._orders.choose_best(even, config), load, even)
        return None if prediction.gain > 0 else _decline(prediction, config)

    def _find_options(self, batch: Batch, parts: Sequence[int]) -> list[tuple[BatchSlice, ...]]:
        """Return the ways to cut that are worth a prediction: even by tokens, and even by cost."""
        cuts = dict.fromkeys(
            place_cuts(batch, targets)
            for count in parts
            for targets in (share_evenly(batch, count), balance_targets(batch, count, self._density))
        )
        return [slice_batch(batch, cut) for cut in cuts if cut or 1 in parts]

    def _make_choices(
        self, load: BatchFeatures, loads: Sequence[BatchFeatures], config: RuntimeConfig, **where: Any
    ) -> list[SplitChoice]:
        orders = self._orders.find(loads, config)
        return [SplitChoice(ordered, self._predict(ordered, load, loads), **where) for ordered in orders]

    def _predict(self, ordered: NamedOrder, load: BatchFeatures, loads: Sequence[BatchFeatures]) -> Prediction:
        factors = self.correction.factor(UNSPLIT), self.correction.factor(SPLIT)

        def predict(predictor: Predictor) -> tuple[float, float]:
            return predictor.predict_unsplit(load) * factors[0], predictor.predict_split(ordered, loads) * factors[1]

        whole, split = predict(self._predictor)
        longer = compute_gain(whole, split * (1 + self.table.split_error))
        worst_case = min(longer, *(compute_gain(*predict(predictor)) for predictor in self._worst_cases))
        return Prediction(whole, split, len(loads), worst_case, list_side_ops(ordered.schedule.programs[0]))

    def _decide(
        self, options: Sequence[SplitChoice], load: BatchFeatures, config: RuntimeConfig
    ) -> SplitChoice | Decline:
        ranked = sorted(filter(_changes, options), key=lambda choice: choice.prediction.split)
        if not ranked:
            return Decline("nowhere to cut", f"{load.tokens} tokens")
        if config.mode == "always":
            return next((choice for choice in ranked if choice.prediction.micro_batches > 1), ranked[0])
        bucket = get_bucket(load, FINE)
        for choice in ranked:  # what would be fastest may be unsafe where something slower is not
            if self._gate.decide((bucket, choice.prediction.micro_batches), choice.prediction, config.margin):
                return choice
        return _decline(ranked[0].prediction, config)


def _changes(choice: SplitChoice) -> bool:
    """Whether a choice is not just the whole step, with all ops on the lanes on which a model runs them."""
    return choice.prediction.micro_batches > 1 or SIDE in choice.order.schedule.lanes


def _decline(prediction: Prediction, config: RuntimeConfig) -> Decline:
    figures = f"{prediction}; DBO_MARGIN asks for more than {config.margin:.1%} less, and no loss if costs are off"
    return Decline("no gain predicted", figures, prediction.whole)


def list_parts(config: RuntimeConfig) -> Sequence[int]:
    """Return the numbers of micro-batches to choose from."""
    return range(2, MOST_MICRO_BATCHES + 1) if config.micro_batches is None else (config.micro_batches,)


def get_uncertainty(table: CostTable) -> float:
    """Return by which share costs may be off, all of them at once: by the median error of their fits, within reason.

    A single op may be off by more; but what counts is sums over several kinds of op, whose errors cancel in part.
    """
    return min(median(table.errors.values()), MAX_UNCERTAINTY) if table.errors else DEFAULT_UNCERTAINTY
