"""Whether to split a step, into how many micro-batches, where, and in which issue order: from costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dbo_runtime.batch import Batch, BatchSlice, Decline, find_cuts, share_evenly, share_together, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.correction import SPLIT, WHOLE, Correction
from dbo_runtime.planner.costs import CostTable, Load
from dbo_runtime.planner.cuts import balance_targets, find_density, measure_slices
from dbo_runtime.planner.gate import Gate
from dbo_runtime.planner.jobs import make_jobs
from dbo_runtime.planner.predict import predict_timeline
from dbo_runtime.planner.search import find_order
from dbo_runtime.policies import Order, alternate, find_policy, staggered
from dbo_runtime.program import Program
from dbo_runtime.schedule import Schedule, Step, lower

MOST_MICRO_BATCHES = 3  # that `auto` tries: more add little where phases match, and pay every fixed cost again
MOST_STATES = 40_000  # of the search while a step waits for its plan: half a second
FINE = 8  # buckets an octave, for predictions
COARSE = 1  # and for orders, of which few are needed
REMEMBERED = 4096  # batches whose decision is kept

Bucket = tuple[int, ...]
"""Where a load is among others: tokens, and all else for each token, in parts of an octave [fields of a load]."""

Shape = tuple[Bucket, ...]
"""The loads of micro-batches, in buckets."""


class Prediction(NamedTuple):
    """Seconds of a step, whole and split, and what no order could beat."""

    whole: float
    split: float
    micro_batches: int

    @property
    def gain(self) -> float:
        """The share of the whole step's time that splitting saves; negative if it costs."""
        return 1 - self.split / self.whole if self.whole > 0 else 0.0

    def __str__(self) -> str:
        """Such as `12.1 ms whole, 9.8 ms in 2 micro-batches: 19.0 % less`."""
        more = "less" if self.gain >= 0 else "more"
        figures = f"{self.whole * 1e3:.2f} ms whole, {self.split * 1e3:.2f} ms in {self.micro_batches} micro-batches"
        return f"{figures}: {abs(self.gain):.1%} {more}"


@dataclass(frozen=True, slots=True)
class NamedOrder:
    """An issue order, with a short name that stands for it."""

    name: str
    order: Order
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Choice:
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
        program: of one micro-batch.
        table: the costs of its ops.
        most_states: what the search for an order may look at; see `search.find_order`.
    """

    def __init__(self, program: Program, table: CostTable, most_states: int = MOST_STATES) -> None:
        table.times(program, Load(1, 1.0, 1.0))  # raises if an op has no cost
        self.program = program
        self.table = table
        self.correction = Correction()
        self._gate = Gate()
        self._most_states = most_states
        self._density = find_density(table, program)
        self._kinds = Counter(op.name for op in program.ops)
        self._orders: dict[tuple[object, ...], NamedOrder] = {}
        self._simulated: dict[tuple[str, Shape], float] = {}
        self._decisions: dict[tuple[Batch, RuntimeConfig], Choice | Decline] = {}

    def choose(self, batch: Batch, config: RuntimeConfig) -> Choice | Decline:
        """Return how to split *batch*, or why not; `mode` and `margin` of the settings decide.

        A batch that was seen before is decided at once, as long as the correction stays what it was.
        """
        known = self._decisions.get((batch, config))
        if known is None:
            if len(self._decisions) >= REMEMBERED:
                self._decisions.clear()
            known = self._decisions[batch, config] = self._choose(batch, config)
        return known

    def choose_together(self, tokens: Sequence[int], config: RuntimeConfig) -> Choice | Decline:
        """Return how all data parallel ranks split a step: *tokens* of each [ranks] are all they know of each other.

        The slowest rank keeps the others waiting, so the largest load counts. Contexts and the lengths of requests are
        not known, and attention to them is left out.
        """
        load = Load(max(tokens), 0.0, 0.0)
        options = []
        for parts in _find_parts(config):
            sizes = share_together(tokens, parts)
            if not isinstance(sizes, Decline):
                loads = [Load(max(part), 0.0, 0.0) for part in sizes]
                options.append(self._make_choice(load, loads, config, sizes=sizes))
        return self._decide(options, load, config)

    def predict_whole(self, load: Load) -> float:
        """Return the seconds of a step that is not split: its ops one after the other, or the host that issues them."""
        issued = self.table.host.issue * len(self.program.ops)
        host = self.table.host
        seconds = max(self._sum_ops(load), issued) + host.whole + host.whole_per_token * load.tokens
        return max(seconds, 0.0) * self.correction.factor(WHOLE)

    def predict_split(self, loads: Sequence[Load], config: RuntimeConfig) -> float:
        """Return the seconds of a step split into micro-batches of these loads."""
        return self._predict(self._find_order(loads, config), loads)

    def draw_timeline(self, loads: Sequence[Load], config: RuntimeConfig) -> Timeline:
        """Return when each op would run in a step split into micro-batches of these loads."""
        return self._simulate(self._find_order(loads, config).schedule, loads)

    def find_schedule(self, loads: Sequence[Load], config: RuntimeConfig) -> Schedule:
        """Return the schedule of a step split into micro-batches of these loads."""
        return self._find_order(loads, config).schedule

    def note(self, way: str, predicted: float, measured: float) -> None:
        """Learn from a step: *predicted* with the correction of now, and *measured*, in seconds."""
        self.correction.note(way, predicted / self.correction.factor(way), measured)

    def correct(self, proposals: Sequence[dict[str, float]]) -> None:
        """Apply what all ranks propose; decisions are made anew."""
        self.correction.apply(proposals)
        self._decisions.clear()

    def _choose(self, batch: Batch, config: RuntimeConfig) -> Choice | Decline:
        (load,) = measure_slices(batch, slice_batch(batch, ()))
        if not batch.prefill_tokens and config.mode == "auto":
            hopeless = self._decline_decode(load, config)
            if hopeless is not None:
                return hopeless
        options = [
            self._make_choice(load, measure_slices(batch, slices), config, slices=slices)
            for slices in self._find_options(batch, config)
        ]
        return self._decide(options, load, config)

    def _decline_decode(self, load: Load, config: RuntimeConfig) -> Decline | None:
        """Return why not even an even split would pay. Decodes are frequent and short, and rarely worth their cuts."""
        parts = _find_parts(config)[0]
        if load.tokens < parts:
            return None
        even = [Load(load.tokens // parts, *(amount / parts for amount in load[1:]))] * parts
        prediction = Prediction(self.predict_whole(load), self.predict_split(even, config), parts)
        return None if prediction.gain > 0 else _decline(prediction, config)

    def _find_options(self, batch: Batch, config: RuntimeConfig) -> list[tuple[BatchSlice, ...]]:
        """Return the ways to cut that are worth a prediction: even by tokens, and even by cost."""
        cuts = dict.fromkeys(
            find_cuts(batch, targets)
            for parts in _find_parts(config)
            for targets in (share_evenly(batch, parts), balance_targets(batch, parts, self._density))
        )
        return [slice_batch(batch, cut) for cut in cuts if cut]

    def _make_choice(self, load: Load, loads: Sequence[Load], config: RuntimeConfig, **where: Any) -> Choice:
        ordered = self._find_order(loads, config)
        prediction = Prediction(self.predict_whole(load), self._predict(ordered, loads), len(loads))
        return Choice(ordered, prediction, **where)

    def _decide(self, options: Sequence[Choice], load: Load, config: RuntimeConfig) -> Choice | Decline:
        if not options:
            return Decline("nowhere to cut", f"{load.tokens} tokens")
        best = min(options, key=lambda choice: choice.prediction.split)
        gain = best.prediction.gain
        if config.mode == "always" or self._gate.decide(_find_bucket(load, FINE), gain, config.margin):
            return best
        return _decline(best.prediction, config)

    def _sum_ops(self, load: Load) -> float:
        return sum(count * self.table.ops[name].time(load) for name, count in self._kinds.items())

    def _predict(self, ordered: NamedOrder, loads: Sequence[Load]) -> float:
        """Return what a step takes: simulated for the middles of the loads' buckets, and scaled."""
        shape = tuple(_find_bucket(load, FINE) for load in loads)
        if (ordered.name, shape) not in self._simulated:
            middles = [_find_middle(bucket, FINE) for bucket in shape]
            ops = sum(map(self._sum_ops, middles))
            self._simulated[ordered.name, shape] = _find_end(self._simulate(ordered.schedule, middles)) / (ops or 1.0)
        ratio = self._simulated[ordered.name, shape]
        host, tokens = self.table.host, sum(load.tokens for load in loads)
        seconds = ratio * sum(map(self._sum_ops, loads)) + host.split + host.split_per_token * tokens
        return max(seconds, 0.0) * self.correction.factor(SPLIT)

    def _find_order(self, loads: Sequence[Load], config: RuntimeConfig) -> NamedOrder:
        """Return the order for loads like these: what the settings name, or the best that is known for their octave."""
        policy = config.policy
        each = Load(*(sum(values) / len(loads) for values in zip(*loads, strict=True)))
        bucket = _find_bucket(each, COARSE) if policy[0] == "optimal" else None
        key = len(loads), policy, bucket
        if key not in self._orders:
            programs = (self.program,) * len(loads)
            if bucket is None:
                order = find_policy(*policy)(programs)
            else:
                order = self._search(programs, _find_middle(bucket, COARSE))
            name = "-".join(map(str, (policy[0], policy[1], len(loads), *(bucket or ()))))
            self._orders[key] = NamedOrder(name, order, lower(programs, order))
        return self._orders[key]

    def _search(self, programs: Sequence[Program], load: Load) -> Order:
        """Return the best of the order that is optimal without contention, and of what everyone else uses."""
        times = self.table.times(self.program, load)
        found = find_order(make_jobs(programs, [times] * len(programs)), self._most_states)
        candidates = (found.order, alternate(programs), staggered(programs, 1))
        loads = [load] * len(programs)
        return min(candidates, key=lambda order: _find_end(self._simulate(lower(programs, order), loads)))

    def _simulate(self, schedule: Schedule, loads: Sequence[Load]) -> Timeline:
        times = [self.table.times(self.program, load) for load in loads]
        return predict_timeline(schedule, partial(_look_up, times), self.table.contention, self.table.host)


def _decline(prediction: Prediction, config: RuntimeConfig) -> Decline:
    figures = f"{prediction}; DBO_MARGIN asks for more than {config.margin:.1%} less"
    return Decline("no gain predicted", figures, prediction.whole)


def _find_parts(config: RuntimeConfig) -> Sequence[int]:
    return range(2, MOST_MICRO_BATCHES + 1) if config.micro_batches is None else (config.micro_batches,)


def _find_bucket(load: Load, per_octave: int) -> Bucket:
    """Return the bucket of a load: rounded logarithms of its tokens, and of all else for each token."""
    ratios = (load.tokens, *(amount / load.tokens for amount in load[1:]))
    return tuple(round(per_octave * math.log2(1 + ratio)) for ratio in ratios)


def _find_middle(bucket: Bucket, per_octave: int) -> Load:
    """Return the load in the middle of a bucket."""
    tokens, *ratios = (2 ** (number / per_octave) - 1 for number in bucket)
    count = max(1, round(tokens))
    return Load(count, *(ratio * count for ratio in ratios))


def _look_up(times: Sequence[Sequence[float]], step: Step) -> float:
    return times[step.issue.micro_batch][step.issue.position]


def _find_end(timeline: Timeline) -> float:
    return max(span.end for span in timeline.spans)
