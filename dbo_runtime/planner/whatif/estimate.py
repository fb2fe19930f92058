"""Predict many steps fast: prompts from programs of few layers, because every further layer adds the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.hysteresis import Prediction
from dbo_runtime.planner.online.planner import Planner

# Layers to which the longest run of equal ones is shortened. Prologue and epilogue are the same with both, so their
# difference is what layers add.
FEW_LAYERS, MORE_LAYERS = 4, 8
ESTIMATE_SEARCH_STATES = 4_000  # of each search: enough for two micro-batches, and within 1 % for three


class Estimator:
    """Predicts steps of one table, unsplit and in their best split.

    Steps of decodes are predicted with all layers: they gain or lose a few percent, which is less than the error of
    extrapolating from few layers.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._longest = max((run.repeat for run in table.program.runs), default=0)
        self._known: dict[tuple[Batch, RuntimeConfig], tuple[Prediction, ...]] = {}

    def estimate(self, batch: Batch, config: RuntimeConfig) -> Prediction | None:
        """Return the prediction for the best number of micro-batches; None if the step cannot be cut."""
        return next(iter(self.list_options(batch, config)), None)

    def list_options(self, batch: Batch, config: RuntimeConfig) -> tuple[Prediction, ...]:
        """Return a prediction for each number of micro-batches, the fastest first; none if the step cannot be cut.

        If some number of micro-batches loses, more are not tried: each pays the fixed costs.
        """
        if (batch, config) not in self._known:
            options: dict[int, Prediction] = {}
            for parts in self._get_planners(batch)[0].list_parts(config):
                option = self._estimate_parts(batch, replace(config, mode="always", micro_batches=parts))
                if option is not None:
                    options[option.micro_batches] = option  # some batches cannot be cut that often
                if parts > 1 and (option is None or option.gain <= 0):
                    break
            self._known[batch, config] = tuple(sorted(options.values(), key=lambda option: option.split))
        return self._known[batch, config]

    def _estimate_parts(self, batch: Batch, config: RuntimeConfig) -> Prediction | None:
        planners = self._get_planners(batch)
        choice = planners[0].choose(batch, config)
        if isinstance(choice, Decline):
            return None
        (features,) = measure_slices(batch, slice_batch(batch, ()))
        slice_features = measure_slices(batch, choice.slices)
        unsplit = self._extend([planner.predict_unsplit(features) for planner in planners])
        split = self._extend([planner.predict_split(slice_features, config) for planner in planners])
        return choice.prediction._replace(
            unsplit=unsplit, split=split
        )  # the worst case, a ratio, hardly depends on layers

    def _extend(self, seconds: list[float]) -> float:
        """Return the seconds with all layers, from those with all, or with MORE_LAYERS and FEW_LAYERS."""
        further = (self._longest - MORE_LAYERS) / (MORE_LAYERS - FEW_LAYERS) if len(seconds) == 2 else 0.0
        return seconds[0] + further * (seconds[0] - seconds[-1])

    def _get_planners(self, batch: Batch) -> list[Planner]:
        return self._few if batch.prefill_tokens and self._longest > MORE_LAYERS else self._all

    @cached_property
    def _all(self) -> list[Planner]:
        return [_open_planner(self._table, self._longest, self._longest)]

    @cached_property
    def _few(self) -> list[Planner]:
        return [_open_planner(self._table, self._longest, depth) for depth in (MORE_LAYERS, FEW_LAYERS)]


def resize_batch(batch: Batch, tokens: int) -> Batch:
    """Return a batch of *tokens* tokens that is otherwise like this one.

    Prompts grow and shrink in proportion, and are dropped if there are fewer tokens than prompts; of decodes, which
    have one token each, there are more or fewer.
    """
    count = min(len(batch.query_lens), tokens) if batch.prefill_tokens else tokens
    contexts = tuple(batch.contexts[number % len(batch.contexts)] for number in range(count))
    if not batch.prefill_tokens:
        return replace(batch, query_lens=(1,) * count, context_lens=contexts)
    kept = batch.query_lens[:count]
    spare = tokens - count  # in addition to one token for each
    edges = [spare * part // sum(kept) for part in accumulate(kept, initial=0)]
    lengths = tuple(1 + right - left for left, right in pairwise(edges))
    return replace(batch, query_lens=lengths, prefill_tokens=tokens, context_lens=contexts)


def _open_planner(table: CostTable, longest: int, depth: int) -> Planner:
    numbers = [number for number, run in enumerate(table.program.runs) if run.repeat == longest]
    runs = tuple(
        run._replace(repeat=depth) if number == numbers[-1] else run for number, run in enumerate(table.program.runs)
    )
    short = replace(table, program=replace(table.program, runs=runs))
    return Planner(build_program(short.program), short, ESTIMATE_SEARCH_STATES)
