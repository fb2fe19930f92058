"""Predictions over a grid of sizes and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.progress import show_progress
from dbo_runtime.lab.whatif.estimate import Estimator, resize_batch
from dbo_runtime.lab.whatif.scale import Bandwidth, Network, scale_bandwidth, scale_tensor
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.prediction import Prediction

TOKENS, BANDWIDTH, RANKS = "tokens", "bandwidth", "tp"
DECODES = "decodes"  # name of the axis `tokens` for steps with only decodes
GRIDS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        TOKENS: (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        BANDWIDTH: (0.25, 0.5, 1, 2, 4),
        RANKS: (4, 8, 16, 32, 64, 128, 256, 512, 1024),
    }
)


DECODES_GRID = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


class Cell(NamedTuple):
    """One point of a grid, with its predictions.

    Attributes:
        values: coordinates of the point, by axis.
        options: a prediction for each number of micro-batches, fastest first; empty if the step cannot be cut.
    """

    values: Mapping[str, float]
    options: tuple[Prediction, ...]

    @property
    def prediction(self) -> Prediction | None:
        """The fastest option; None if the step cannot be cut."""
        return self.options[0] if self.options else None

    def choose(self, margin: float) -> Prediction | None:
        """Return the option that the runtime would take: the fastest one that pays even in the worst case."""
        return next((option for option in self.options if option.pays(margin)), None)


def parse_axes(text: str) -> tuple[str, ...]:
    """Read axes, such as `tokens,tp`.

    Raises:
        ConfigError: an axis is unknown or repeated, or there is none.
    """
    axes = tuple(part.strip() for part in text.split(","))
    if not set(axes) <= set(GRIDS) or len(set(axes)) < len(axes):
        raise ConfigError(f"sweep is {text!r}; it takes some of {', '.join(GRIDS)}, each once, joined by commas.")
    return axes


def has_sizes(axes: Sequence[str]) -> bool:
    """Return whether a sweep only varies sizes of the step."""
    return tuple(axes) == (TOKENS,)


def list_grid(axes: Sequence[str], are_decodes: bool = False) -> dict[str, tuple[float, ...]]:
    """Return the values of each axis. With three axes, every other value, so that the table stays readable and fast."""
    grids = {**GRIDS, DECODES: DECODES_GRID}
    names = (DECODES if are_decodes and axis == TOKENS else axis for axis in axes)
    return {name: grids[name][:: 2 if len(axes) > 2 else 1] for name in names}


def list_steps(axes: Sequence[str], batch: Batch) -> list[Batch]:
    """Return a step of each size in the grid, which resemble *batch*."""
    grid = list_grid(axes, not batch.prefill_tokens)
    return [resize_batch(batch, int(size)) for size in grid.get(TOKENS, grid.get(DECODES, (batch.tokens,)))]


def sweep(
    table: CostTable,
    batch: Batch,
    config: RuntimeConfig,
    axes: Sequence[str],
    estimator: Estimator | None = None,
    network: Network | None = None,
) -> list[Cell]:
    """Return a prediction for each point of the grid. The last axis varies fastest.

    Other properties are those of *table* and *batch*. Steps are predicted by `estimate.Estimator`. *estimator* is
    an estimator for *table*, if the caller has one that suits the sizes. *network* is the network to scale the number
    of ranks on; see `scale_tensor`.

    Raises:
        ConfigError: the costs cannot be scaled.
    """
    grid = list_grid(axes, not batch.prefill_tokens)
    estimators: dict[tuple[float, ...], Estimator] = {} if estimator is None else {(): estimator}
    cells = []
    steps = list_steps(axes, batch)
    for point in show_progress(list(product(*grid.values())), "sweeping", "point"):
        values = dict(zip(grid, point, strict=True))
        machine = tuple(value for axis, value in values.items() if axis not in (TOKENS, DECODES))
        if machine not in estimators:
            estimators[machine] = Estimator(_scale(table, values, network), steps)
        sized = resize_batch(batch, int(values.get(TOKENS, values.get(DECODES, batch.tokens))))
        cells.append(Cell(MappingProxyType(values), estimators[machine].list_options(sized, config)))
    return cells


def _scale(table: CostTable, values: Mapping[str, float], network: Network | None) -> CostTable:
    if RANKS in values:
        table = scale_tensor(table, int(values[RANKS]), network)
    return scale_bandwidth(table, Bandwidth(values.get(BANDWIDTH, 1.0)))
