"""The same question over a grid of sizes and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError
from dbo_runtime.planner.costs import CostTable
from dbo_runtime.planner.estimate import Estimator, resize_batch
from dbo_runtime.planner.gate import Prediction
from dbo_runtime.planner.scale import Bandwidth, scale_bandwidth, scale_tensor

TOKENS, BANDWIDTH, RANKS = "tokens", "bandwidth", "tp"
GRIDS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        TOKENS: (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        BANDWIDTH: (0.25, 0.5, 1, 2, 4),
        RANKS: (4, 8, 16, 32, 64, 128, 256, 512, 1024),
    }
)


class Cell(NamedTuple):
    """One point of a grid.

    Attributes:
        values: where it is, by axis.
        prediction: for the best split there; None if there is nowhere to cut.
    """

    values: Mapping[str, float]
    prediction: Prediction | None

    def pays(self, margin: float) -> bool:
        """Whether the runtime would split."""
        return self.prediction is not None and self.prediction.pays(margin)


def parse_axes(text: str) -> tuple[str, ...]:
    """Read axes, such as `tokens,tp`.

    Raises:
        ConfigError: if one is unknown, or stands there twice, or there is none.
    """
    axes = tuple(part.strip() for part in text.split(","))
    if not set(axes) <= set(GRIDS) or len(set(axes)) < len(axes):
        raise ConfigError(f"sweep is {text!r}; it takes some of {', '.join(GRIDS)}, each once, joined by commas.")
    return axes


def list_grid(axes: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the values of each axis: of three axes every other one, so that the table stays readable, and quick."""
    return {axis: GRIDS[axis][:: 2 if len(axes) > 2 else 1] for axis in axes}


Point = tuple[float, ...]
Watch = Callable[[Sequence[Point]], Iterable[Point]]


def sweep(
    table: CostTable, batch: Batch, config: RuntimeConfig, axes: Sequence[str], watch: Watch = iter
) -> list[Cell]:
    """Return a prediction for each point of the grid, the last axis running fastest.

    What is no axis stays as it is in *table* and *batch*. Steps are predicted by `estimate.Estimator`. *watch* is given
    the points, and hands them on: a progress bar, for one.

    Raises:
        ConfigError: if the costs cannot be scaled.
    """
    grid = list_grid(axes)
    estimators: dict[tuple[float, ...], Estimator] = {}
    cells = []
    for point in watch(list(product(*grid.values()))):
        values = dict(zip(grid, point, strict=True))
        machine = tuple(value for axis, value in values.items() if axis != TOKENS)
        if machine not in estimators:
            estimators[machine] = Estimator(_scale(table, values))
        sized = resize_batch(batch, int(values.get(TOKENS, batch.tokens)))
        cells.append(Cell(MappingProxyType(values), estimators[machine].estimate(sized, config)))
    return cells


def _scale(table: CostTable, values: Mapping[str, float]) -> CostTable:
    if RANKS in values:
        table = scale_tensor(table, int(values[RANKS]))
    return scale_bandwidth(table, Bandwidth(values.get(BANDWIDTH, 1.0)))
