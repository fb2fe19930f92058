"""Experts that vllm-ascend places by load (dynamic EPLB) on A3, where tokens are sent to them by all-to-all.

It counts the rows of each expert in each step, plans in a process of its own where experts should be, and moves or
copies them layer by layer while steps run. Unsplit steps are its own, so that answers are close and loads are equal.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import pytest

from tests.support.ascend.drafts import leave_backend
from tests.support.ascend.engines import FOUR, OPTIONS, TINY, start
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.modelslim import quantize_model
from tests.support.vllm.drafters import draft_by_mtp
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.ranks import Ranks

A2 = {"DYNAMIC_EPLB": "true"}  # lets workers have children
A3 = {**A2, "STANDIN_ASCEND_CHIP": "A3", "NPU_STANDIN_HCCL_TIMEOUT": "30"}
COLLECTING, PLANNING = 24, 2  # steps; then one for each layer that has experts, a drafter's included
LAYERS = 2  # of the model that have experts
EPLB = {
    "dynamic_eplb": True,
    "expert_heat_collection_interval": COLLECTING,
    "algorithm_execution_interval": PLANNING,
}
KINDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "bf16": (A3, {}),
    "W8A8": (A3, {"quantization": "ascend"}),
    "MTP": (A3, leave_backend(draft_by_mtp(2))),
    "gathered": (A2, {}),
}
# As in test_sequence_parallel.py; what is gathered, to the bit.
TOLERANCE = {"bf16": 0.13, "W8A8": 0.25, "MTP": 0.13, "gathered": 0.0}
PROMPTS = make_prompts(61, 45, 33)
CUTS = [[61], [106], [61, 106]]  # between requests: micro-batches have odd sizes, whose chunks are padded
SHORT = make_prompts(40, 30)

REROUTED = 2  # rows of one token: an all-to-all adds results of its experts in another order

Loads = list[list[list[int]]]
"""Rows of each expert [workers, layers, experts of the rank]."""


class Step(NamedTuple):
    """A prefill.

    Attributes:
        answers: to its prompts.
        split: how many steps were split on each worker.
        loads: what it added to them.
    """

    answers: list[Answer]
    split: list[int]
    loads: Loads


def make_options(tensor_parallel_size: int = 2, **changes: Any) -> dict[str, Any]:
    """Return the options of an engine that balances the load of its experts."""
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "enable_expert_parallel": True,
        "additional_config": {**OPTIONS["additional_config"], "eplb_config": {**EPLB, **changes}},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_loads_are_equal_and_answers_close_before_and_after_experts_move(kind: str, tmp_path: Path) -> None:
    model = quantize_model(TINY, tmp_path / "quantized") if kind == "W8A8" else TINY
    environment, options = KINDS[kind]
    for npus in start(1, model, environment, **make_options(), **options):
        unmoved = compare_steps(npus, [PROMPTS], CUTS, TOLERANCE[kind])
        move_experts(npus, [SHORT], [40])
        rerouted = REROUTED if kind == "MTP" else 0  # by the drafter, which reads hidden states
        moved = compare_steps(npus, [PROMPTS], CUTS, TOLERANCE[kind], rerouted)
        assert find_difference(unmoved[0].answers, moved[0].answers) <= (TOLERANCE[kind] or TOLERANCE["bf16"])
        if kind == "bf16":
            assert_each_remedy_is_needed(npus, moved[0])


def assert_each_remedy_is_needed(npus: Ranks, unsplit: Step) -> None:
    """Take one remedy away at a time: loads are wrong, though answers are not."""
    for remedy, check in ((None, "1"), ("_add_load", "0"), ("_leave_out", "0"), ("repeating_step", "1")):
        (split,) = npus.run(prefill, [PROMPTS], CUTS[0], remedy, check)
        assert find_difference(unsplit.answers, split.answers) <= TOLERANCE["bf16"]
        assert (split.loads == unsplit.loads) == (remedy is None)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor_parallel", "chip"), [(1, "A2"), (1, "A3"), (2, "A3")])
def test_data_parallel_ranks_count_what_their_experts_get(tensor_parallel: int, chip: str) -> None:
    """Of ranks of one size, because vllm-ascend counts the padding of others, too, which has no defined value."""
    options = make_options(tensor_parallel_size=tensor_parallel)
    options["additional_config"]["enable_shared_expert_dp"] = tensor_parallel > 1
    prompts = [make_prompts(41, 30, 25, 5), make_prompts(45, 33, 23)]
    cuts = [[[41], [45]], [[71], [78]]]
    tolerance = TOLERANCE["gathered" if chip == "A2" else "bf16"]
    for npus in start(2, TINY, {**FOUR, **(A3 if chip == "A3" else A2)}, **options):
        compare_steps(npus, prompts, cuts, tolerance)
        move_experts(npus, [SHORT, SHORT], [[40], [40]])
        compare_steps(npus, prompts, cuts, tolerance, REROUTED if chip == "A3" else 0)
        different = [make_prompts(41, 30, 25, 5), make_prompts(40, 20)]
        unsplit_by_rank, splits = (npus.run(answer, different, 1, edges) for edges in (None, [[41], [40]]))
        for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
            assert [count["split"] for count in counts] == [1] * len(counts)
            assert find_difference(unsplit, split) <= tolerance


@pytest.mark.slow
def test_vllm_ascend_does_not_load_redundant_experts() -> None:
    """The last places are those of copies of the first experts."""
    for npus in start(1, TINY, A3, **make_options(num_redundant_experts=2)):
        (layers,) = npus.run(sum_experts)
        (reasons,) = npus.run(find_reasons)
        assert [reason for reason in reasons if "num_redundant_experts" in reason] == reasons != []
        for places in layers:
            assert len(set(places[:8])) == 8
            assert set(places[8:]).isdisjoint(places[:2])


def sum_experts(engine: Engine, rank: int) -> list[list[int]]:
    """Return a checksum of the weights in each place [layers][places]."""
    of_workers = engine.llm.collective_rpc(_sum_experts)
    return [[place for worker in layer for place in worker] for layer in zip(*of_workers, strict=True)]


def find_reasons(engine: Engine, rank: int) -> list[str]:
    """Return why this configuration is not split, before its model is looked at."""
    (reasons, _) = engine.llm.collective_rpc(_find_reasons)
    return list(reasons)


def compare_steps(npus: Ranks, prompts: list[Any], cuts: list[Any], tolerance: float, rerouted: int = 0) -> list[Step]:
    """Compare prefills that are cut there with vllm-ascend's own; return its own on each rank.

    In layers after the first that has experts, as many rows may be *rerouted* by rounding.
    """
    unsplit_by_rank: list[Step] = npus.run(prefill, prompts, None)
    for edges in cuts:
        for unsplit, split in zip(unsplit_by_rank, npus.run(prefill, prompts, edges), strict=True):
            assert split.split == [1] * len(split.split)
            assert find_difference(unsplit.answers, split.answers) <= tolerance
            assert [worker[0] for worker in split.loads] == [worker[0] for worker in unsplit.loads]
            assert count_moved(split.loads, unsplit.loads) <= rerouted
    return unsplit_by_rank


def count_moved(some: Loads, others: Loads) -> int:
    """Return how many rows are of other experts, at least."""
    pairs = zip(chain(*chain(*some)), chain(*chain(*others)), strict=True)
    return sum(max(one - other, 0) for one, other in pairs)


def move_experts(npus: Ranks, prompts: list[Any], cuts: list[Any]) -> None:
    """Run split steps until vllm-ascend has planned and moved experts, in each layer that splits."""
    before = npus.run(read_places)
    steps = npus.run(count_steps)
    assert len(set(steps)) == 1
    for _ in range(COLLECTING + PLANNING + len(before[0][0]) - steps[0]):
        assert all(count["split"] == 1 for _, counts in npus.run(answer, prompts, 1, cuts) for count in counts)
    assert npus.run(count_steps) == [0] * len(steps)
    for workers in zip(before, npus.run(read_places), strict=True):
        for was, now in zip(*workers, strict=True):
            assert all(old != new for old, new in zip(was[:LAYERS], now[:LAYERS], strict=True))


def prefill(
    engine: Engine,
    rank: int,
    prompts: list[Any],
    cuts: list[Any] | None,
    without: str | None = None,
    check: str = "0",
) -> Step:
    """Prefill prompts in one step, unsplit or cut there, if need be *without* one of the remedies."""
    before = engine.llm.collective_rpc(_read_loads)
    engine.llm.collective_rpc(_take_away, args=(without,))
    try:
        answers, counts = answer(engine, rank, prompts, 1, cuts, DBO_CHECK=check)
    finally:
        engine.llm.collective_rpc(_give_back)
    loads = [
        [[x - y for x, y in zip(*layer, strict=True)] for layer in zip(*worker, strict=True)]
        for worker in zip(engine.llm.collective_rpc(_read_loads), before, strict=True)
    ]
    return Step(answers, [count["split"] for count in counts], loads)


def read_places(engine: Engine, rank: int) -> list[list[list[int]]]:
    """Return the place of each expert that this rank's workers choose [workers, layers, experts]."""
    found: list[list[list[int]]] = engine.llm.collective_rpc(_read_places)
    return found


def count_steps(engine: Engine, rank: int) -> int:
    """Return how many steps of a cycle of collecting, planning and moving are done."""
    (done, *others) = engine.llm.collective_rpc(_count_steps)
    assert all(other == done for other in others)
    return int(done)


def _read_loads(worker: Any) -> list[list[int]]:
    return [layer.moe_load.tolist() for layer in worker.model_runner.eplb_adaptor.moe_layers]


def _read_places(worker: Any) -> list[list[int]]:
    return [layer.log2phy.tolist() for layer in worker.model_runner.eplb_adaptor.moe_layers]


def _count_steps(worker: Any) -> int:
    return int(worker.model_runner.eplb_updator.cur_iterations)


def _take_away(worker: Any, remedy: str | None) -> None:
    """Take a remedy away until `_give_back`."""
    from dbo_runtime.vllm_plugin.parallel.experts import SequenceParallelExperts
    from dbo_runtime.vllm_plugin.platforms.npu import NpuPlatform
    from dbo_runtime.vllm_plugin.platforms.npu_experts import AscendMoeLayer

    worker.patches = ExitStack()
    patches = {
        "_add_load": (AscendMoeLayer, lambda layer, applied: None),
        "repeating_step": (NpuPlatform, lambda platform: nullcontext()),
        "_leave_out": (SequenceParallelExperts, lambda experts, chosen, tokens: chosen),
    }
    if remedy is not None:
        owner, replacement = patches[remedy]
        worker.patches.enter_context(patch.object(owner, remedy, replacement))


def _give_back(worker: Any) -> None:
    worker.patches.close()


def _sum_experts(worker: Any) -> list[list[int]]:
    layers = worker.model_runner.eplb_adaptor.moe_layers
    return [[crc32(expert.float().cpu().numpy().tobytes()) for expert in layer.w13_weight] for layer in layers]


def _find_reasons(worker: Any) -> list[str]:
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    return [str(decline) for decline in get_platform().list_unsupported(worker.vllm_config)]
