"""Steps that others measured unsplit and split, and what the model predicts for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.hysteresis import Prediction
from dbo_runtime.planner.whatif.estimate import Estimator, resize_batch
from dbo_runtime.planner.whatif.formatting import align
from dbo_runtime.planner.whatif.published_cases import get_case

NOTHING = "nothing"
PAYS_FROM = 1.02  # times faster: a measured gain below the default margin is none


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step in two micro-batches, as it was published.

    Attributes:
        case: the published case with the costs of its unsplit step.
        source: where it was published.
        size: tokens of the step.
        speed_up: how many times faster than unsplit it was; None if it is said not to pay, without a figure.
        tolerance: by which share the prediction may differ before the model counts as contradicted.
        fitted: what of the case was fitted to a split step.
    """

    case: str
    source: str
    size: int
    speed_up: float | None
    tolerance: float
    fitted: str = NOTHING

    @property
    def step(self) -> Batch:
        """The requests."""
        return resize_batch(get_case(self.case).step, self.size)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the model predicts for a measurement: how many times faster than unsplit two micro-batches are.

    Attributes:
        measurement: what was published.
        predicted: by the costs as they are.
        one_lane: with all ops that compute on one lane.
        without_contention: if no lane slowed another.
        is_split: whether the runtime would split the step.
    """

    measurement: Measurement
    predicted: float
    one_lane: float
    without_contention: float
    is_split: bool

    @property
    def agrees(self) -> bool:
        """Whether the model is not contradicted.

        The prediction must be within the tolerance, and no gain above what there is without contention; where
        splitting did not pay, the runtime must not split.
        """
        speed_up = self.measurement.speed_up
        if speed_up is None:
            return not self.is_split and self.predicted < PAYS_FROM
        is_near = abs(self.predicted / speed_up - 1) <= self.measurement.tolerance
        return is_near and speed_up <= self.without_contention


CLOUDMATRIX = "arXiv:2506.12708"
MEASUREMENTS = (
    Measurement(
        "r1-ep16-1589", "vllm-ascend #1589", 16_384, 4017 / 3017, 0.05, "contention, to another run: vllm-ascend #941"
    ),
    Measurement("qwen3-tp4-44677", "vLLM #44677", 16_384, 1110 / 1047, 0.01, "contention, to this very measurement"),
    Measurement("qwen36-tp4-56126", "vLLM #56126", 128, None, 0.0),
    Measurement("r1-decode-12708", CLOUDMATRIX, 64, 1.058, 0.07, "the placement, chosen in knowledge of the gains"),
    Measurement("r1-decode-12708", CLOUDMATRIX, 96, 1.094, 0.07, "as above"),
    Measurement("r1-decode-12708", CLOUDMATRIX, 128, 1.069, 0.07, "as above"),
)


def compare(measurement: Measurement) -> Comparison:
    """Return what the model predicts for a measurement."""
    table = get_case(measurement.case).table
    free = replace(table, contention=dict.fromkeys(table.contention, 1.0))
    as_it_is = _predict(table, measurement.step, "auto")
    return Comparison(
        measurement,
        _speed_up(as_it_is),
        _speed_up(_predict(table, measurement.step, "off")),
        _speed_up(_predict(free, measurement.step, "auto")),
        as_it_is.pays(RuntimeConfig().margin),
    )


def describe_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Return a table of what was published and what the model says, as times faster than unsplit."""
    head = "published by", "case", "tokens", "published", "model", "one lane", "no contention", "fitted"
    rows = [
        (
            each.measurement.source,
            each.measurement.case,
            f"{each.measurement.size}",
            "does not pay" if each.measurement.speed_up is None else f"{each.measurement.speed_up:.3f}x",
            f"{each.predicted:.3f}x{'' if each.agrees else ' !'}",
            f"{each.one_lane:.3f}x",
            f"{each.without_contention:.3f}x",
            each.measurement.fitted,
        )
        for each in comparisons
    ]
    note = "times faster in two micro-batches than unsplit; ! where the measurement contradicts the model"
    return f"{note}\n\n{align([head, *rows])}"


def _predict(table: CostTable, step: Batch, side: str) -> Prediction:
    options = Estimator(table).list_options(step, RuntimeConfig(micro_batches=2, side=side))
    (in_two,) = (option for option in options if option.micro_batches == 2)
    return in_two


def _speed_up(prediction: Prediction) -> float:
    return prediction.unsplit / prediction.split
