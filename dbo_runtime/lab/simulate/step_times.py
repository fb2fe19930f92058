"""Seconds of a step by its contents, unsplit and as the runtime would run it: an interpolated grid of predictions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.progress import show_progress
from dbo_runtime.lab.whatif.corners import Corner, move_to
from dbo_runtime.lab.whatif.estimate import open_planner
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.split_choice import SplitChoice

PREFILL_GRID = (0, 256, 1024, 2048, 4096, 8192, 16384)
DECODE_GRID = (0, 16, 64, 128, 256, 512)
Point = tuple[int, int, bool]  # prefill tokens, decodes, whether experts have their most uneven load


class StepPricer(Protocol):
    """Returns how long a step takes."""

    def price(self, prefill_tokens: int, decodes: int) -> tuple[float, float]:
        """Return seconds with even experts, and with the most uneven ones."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A grid of seconds, interpolated linearly in each direction.

    Attributes:
        prefill_grid, decode_grid: values ascending from 0; beyond the last value, seconds grow in proportion.
        seconds: seconds at each point.
    """

    prefill_grid: tuple[int, ...]
    decode_grid: tuple[int, ...]
    seconds: Mapping[Point, float]

    def price(self, prefill_tokens: int, decodes: int) -> tuple[float, float]:
        """See `StepPricer`. An empty step takes no time."""
        rows = _weigh(self.prefill_grid, prefill_tokens)
        columns = _weigh(self.decode_grid, decodes)
        corners = [
            (row * column, tokens, count) for (tokens, row), (count, column) in product(rows, columns) if row * column
        ]
        even, uneven = (
            sum(weight * self.seconds[tokens, count, is_uneven] for weight, tokens, count in corners)
            for is_uneven in (False, True)
        )
        return even, uneven


def predict_step_times(
    table: CostTable, config: RuntimeConfig, budget: int, sequences: int, context: int, truth: Corner
) -> tuple[StepTimes, StepTimes]:
    """Return the times of unsplit steps, and of steps as the runtime decides on them from these costs.

    A prefill is one chunk of a prompt with half of *context* before it. Decodes have *context* tokens each. Decisions
    use the costs as they are. Steps then take the time of the same orders in the corner *truth*, with even load of
    experts and with its imbalance.

    Args:
        table: costs of a rank.
        config: settings of the runtime.
        budget: most tokens of a step, `max_num_batched_tokens`.
        sequences: most sequences, `max_num_seqs`.
        context: mean tokens in the KV cache.
        truth: the true costs, as a corner.
    """
    prefill, decodes = _end_at(PREFILL_GRID, budget), _end_at(DECODE_GRID, sequences)
    points = [_fill_batch(tokens, count, context) for tokens, count in product(prefill, decodes) if tokens or count]
    planner = open_planner(table, points)
    corners = truth._replace(imbalance=1.0), truth
    even, uneven = (Predictor(planner.program, move_to(table, corner)) for corner in corners)
    unsplit: dict[Point, float] = {}
    decided: dict[Point, float] = {}
    for tokens, count in show_progress(list(product(prefill, decodes)), "predicting steps", "step"):
        batch = _fill_batch(tokens, count, context)
        planner.memory.forget()  # each point by itself
        choice = planner.choose(batch, config) if batch.query_lens else None
        (features,) = measure_slices(batch, slice_batch(batch, ())) if batch.query_lens else (None,)
        for is_uneven, predictor in ((False, even), (True, uneven)):
            seconds = predictor.predict_unsplit(features) if features else 0.0
            unsplit[tokens, count, is_uneven] = decided[tokens, count, is_uneven] = seconds
            if isinstance(choice, SplitChoice):
                slices = measure_slices(batch, choice.slices)
                decided[tokens, count, is_uneven] = predictor.predict_split(choice.order, slices)
    return StepTimes(prefill, decodes, unsplit), StepTimes(prefill, decodes, decided)


def _fill_batch(prefill_tokens: int, decodes: int, context: int) -> Batch:
    chunk = (prefill_tokens,) if prefill_tokens else ()
    contexts = (context,) * decodes + ((context // 2,) if chunk else ())
    return Batch((1,) * decodes + chunk, prefill_tokens, context_lens=contexts)


def _end_at(grid: Sequence[int], last: int) -> tuple[int, ...]:
    """Return the grid up to *last*, which becomes its last value."""
    return *(value for value in grid if value < last), last


def _weigh(grid: Sequence[int], value: int) -> tuple[tuple[int, float], ...]:
    """Return the two grid values around *value* with their weights. Beyond the grid, the last one in proportion."""
    if value >= grid[-1]:
        return ((grid[-1], value / grid[-1] if grid[-1] else 1.0),)
    upper = bisect_right(grid, value)
    low, high = grid[upper - 1], grid[upper]
    share = (value - low) / (high - low)
    return (low, 1 - share), (high, share)
