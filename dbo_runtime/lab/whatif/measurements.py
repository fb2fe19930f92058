"""Published measurements of unsplit and split steps, with predictions of the model, and those it cannot predict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.whatif.estimate import Estimator, resize_batch
from dbo_runtime.lab.whatif.expert_scale import scale_experts
from dbo_runtime.lab.whatif.formatting import align
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.scale_cases import find_scale_cases
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.prediction import Prediction

NOTHING = "nothing"
WIDTH = 120
PAYS_FROM = 1.02  # speed-up: a measured gain below the default margin counts as none


@dataclass(frozen=True, slots=True)
class Measurement:
    """A published step in two micro-batches.

    Attributes:
        case: name of the published case with the costs of its unsplit step.
        source: the publication.
        size: number of tokens in the step.
        speed_up: measured speed-up over the unsplit step; None if said not to pay, without a figure.
        tolerance: largest relative difference of the prediction before the model counts as contradicted.
        fitted: the part of the case that was fitted to a split step.
        published: speed-up in words, if a range was published; `speed_up` is then its middle.
        context: number of each decode's tokens in the KV cache, if not the case's.
        ranks: number of ranks that experts were spread over, if not the case's.
        miss: reason why the model is off by more than the tolerance, as far as the publication shows.
    """

    case: str
    source: str
    size: int
    speed_up: float | None
    tolerance: float
    fitted: str = NOTHING
    published: str = ""
    context: int | None = None
    ranks: int | None = None
    miss: str = ""

    @property
    def step(self) -> Batch:
        """The requests of the step."""
        step = resize_batch(get_case(self.case).step, self.size)
        context = step.contexts if self.context is None else (self.context,) * len(step.query_lens)
        return replace(step, context_lens=tuple(context))

    @property
    def table(self) -> CostTable:
        """The costs, with experts spread over the measured number of ranks."""
        table = get_case(self.case).table
        if self.ranks is None:
            return table
        (spread,) = find_scale_cases(name=self.case)
        return scale_experts(table, self.ranks, spread.experts, spread.network)

    @property
    def description(self) -> str:
        """The published speed-up."""
        if self.speed_up is None:
            return "does not pay"
        return self.published or f"{self.speed_up:.3f}x"


class Unpredicted(NamedTuple):
    """A publication that lacks data needed to predict its measurement.

    Attributes:
        source: the publication.
        measured: the published result.
        reason: the missing data.
    """

    source: str
    measured: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The model's prediction for a measurement, as speed-up of two micro-batches over unsplit.

    Attributes:
        measurement: the published measurement.
        predicted: speed-up by the costs as they are.
        one_lane: speed-up with all computing ops on one lane.
        without_contention: speed-up if lanes did not slow each other down.
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

        The prediction must be within the tolerance, and no measured gain may exceed the gain without contention. If
        splitting did not pay, the runtime must not split.
        """
        speed_up = self.measurement.speed_up
        if speed_up is None:
            return not self.is_split and self.predicted < PAYS_FROM
        is_near = abs(self.predicted / speed_up - 1) <= self.measurement.tolerance
        return is_near and speed_up <= self.without_contention


CLOUDMATRIX, SGLANG, TOKENWEAVE = "arXiv:2506.12708", "SGLang 2025-05-05", "arXiv:2505.11329"
_NORMS = (
    "the kernel that reduces also does norm and residual, so even the published step without any communication is "
    "slower than the split one (144.9 against 142.2 ms of 4096 tokens); a model of overlap knows no fusion"
)
MEASUREMENTS = (
    Measurement(
        "r1-tp16-941",
        "vllm-ascend #941",
        16_384,
        1.01 / 0.90,
        0.05,
        miss="no contention is known from the unsplit step, and the prediction has none; with 1.41 on both lanes it is "
        "1.12x. It also left dense layers unsplit, and cut at boundaries of requests only",
    ),
    Measurement(
        "r1-ep16-1589", "vllm-ascend #1589", 16_384, 4017 / 3017, 0.05, "contention, to another run: vllm-ascend #941"
    ),
    Measurement("qwen3-tp4-44677", "vLLM #44677", 16_384, 1110 / 1047, 0.01, "contention, to this very measurement"),
    Measurement("qwen36-tp4-56126", "vLLM #56126", 128, None, 0.0),
    Measurement("r1-decode-12708", CLOUDMATRIX, 64, 1.058, 0.07, "the placement, chosen in knowledge of the gains"),
    Measurement("r1-decode-12708", CLOUDMATRIX, 96, 1.094, 0.07, "as above"),
    Measurement("r1-decode-12708", CLOUDMATRIX, 128, 1.069, 0.07, "as above"),
    Measurement("r1-prefill-910c", CLOUDMATRIX, 8192, 1.27, 0.07, published="1.23x to 1.31x"),
    Measurement(
        "r1-prefill-h800",
        SGLANG,
        8192,
        1.31,
        0.07,
        published="1.27x to 1.35x",
        miss="the model's unsplit step has 6,500 tokens/s a GPU, SGLang's had about 4,500 (50,302 a node by 1.405): "
        "kernels that no roofline has, imbalance of experts (1.18x as much with a perfect balance), and a dispatch "
        "that blocks the host. If compute takes 1.82 times as long, which makes the unsplit steps equal, it is 1.33x",
    ),
    Measurement(
        "r1-decode-h800",
        SGLANG,
        32,
        0.73,
        0.07,
        context=2000,
        ranks=72,
        miss="both lose; the model reads weights twice, but does not know kernels that are slow with 16 tokens",
    ),
    Measurement("r1-decode-h800", SGLANG, 256, 1.255, 0.07, context=2000, ranks=72),
    Measurement("r1-decode-h800", f"{SGLANG}, as MTP", 256, 17_552 / 12_929, 0.07, context=4000, ranks=72),
    Measurement(
        "llama70b-tp8-11329",
        TOKENWEAVE,
        1024,
        53.66 / 46.16,
        0.05,
        miss="as the next; and what does not shrink with the tokens (8.8 ms of 54, by the fit) is paid twice here, "
        "while TokenWeave cuts so that no wave of thread blocks is added",
    ),
    Measurement("llama70b-tp8-11329", TOKENWEAVE, 4096, 179.48 / 142.23, 0.05, miss=_NORMS),
    Measurement("llama70b-tp8-11329", TOKENWEAVE, 16_384, 744.11 / 585.34, 0.05, miss="as above"),
)
UNPREDICTED = (
    Unpredicted(
        "Flux, arXiv:2406.06858",
        "up to 1.66x (prefill) and 1.30x (decode) over vLLM, 8 GPUs",
        "the best of several models and machines, without the unsplit step's parts; and it fuses each product with its "
        "collective, tile by tile, which is another method: no micro-batch pays for anything twice",
    ),
    Unpredicted(
        "FlashOverlap, arXiv:2504.19519",
        "up to 1.65x",
        "of one product with its collective, the best of many shapes; no step of a model was published",
    ),
    Unpredicted(
        "DeepSeek, 2025-02 (open-infra-index, profile-data)",
        "73.7k tokens/s in and 14.8k out a node of 8 H800 served, 62.7k and 18.6k profiled",
        "two micro-batches in all of it; no unsplit step was published to compare with",
    ),
    Unpredicted(
        "vLLM blog, 2025-12-17",
        "1.5k to 2.2k tokens/s a H200, DeepSeek with wide expert parallel",
        "DBO is one of several changes between the two",
    ),
    Unpredicted(
        "vllm-ascend #2241 (closed)",
        "20 % less time to the first token, Qwen3-30B-A3B, DP 2, TP 2",
        "neither the step nor the chip is said",
    ),
)


def compare(measurement: Measurement) -> Comparison:
    """Return the model's prediction for a measurement."""
    table = measurement.table
    free = replace(table, contention=dict.fromkeys(table.contention, 1.0))
    as_it_is = _predict(table, measurement.step, "auto")
    return Comparison(
        measurement,
        _speed_up(as_it_is),
        _speed_up(_predict(table, measurement.step, "off")),
        _speed_up(_predict(free, measurement.step, "auto")),
        as_it_is.pays(RuntimeConfig().margin),
    )


def describe_comparisons(comparisons: Sequence[Comparison], unpredicted: Sequence[Unpredicted] = UNPREDICTED) -> str:
    """Return a table of published and predicted speed-ups, with reasons."""
    head = "published by", "case", "tokens", "published", "model", "one lane", "no contention", "fitted"
    rows = [
        (
            each.measurement.source,
            each.measurement.case,
            f"{each.measurement.size}",
            each.measurement.description,
            f"{each.predicted:.3f}x{'' if each.agrees else ' !'}",
            f"{each.one_lane:.3f}x",
            f"{each.without_contention:.3f}x",
            each.measurement.fitted,
        )
        for each in comparisons
    ]
    note = "times faster in two micro-batches than unsplit; ! where the measurement contradicts the model"
    missed = [each.measurement for each in comparisons if each.measurement.miss]
    misses = [_wrap(f"{each.source}, {each.size} tokens: {each.miss}") for each in missed]
    others = [_wrap(f"{each.source}: {each.measured}. Not predicted: {each.reason}") for each in unpredicted]
    return "\n\n".join([note, align([head, *rows]), "\n".join(["misses", *misses]), "\n".join(["no row", *others])])


def _wrap(text: str) -> str:
    return textwrap.fill(f"{text}.", WIDTH, initial_indent="  ", subsequent_indent="    ")


def _predict(table: CostTable, step: Batch, side: str) -> Prediction:
    options = Estimator(table).list_options(step, RuntimeConfig(micro_batches=2, split="micro", side=side))
    (in_two,) = (option for option in options if option.micro_batches == 2)
    return in_two


def _speed_up(prediction: Prediction) -> float:
    return prediction.unsplit / prediction.split
