"""Gated linear attention inside vllm-ascend, beyond `test_families.py`: is it right, quantized, with drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.drafts import assert_drafts_are_equal
from tests.support.ascend.engines import start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
    assert_ranks_cut_at_their_own_boundaries_are_equal,
)
from tests.support.ascend.families import OPTIONS_OF, make_model
from tests.support.ascend.jobs import answer, make_prompts, order_corrections
from tests.support.ascend.modelslim import DYNAMIC, quantize_model
from tests.support.ascend.mtp_layers import add_qwen_mtp_layer
from tests.support.ascend.reference import answer_in_float, measure_error
from tests.support.vllm.drafters import NGRAM
from tests.support.vllm.engine import Answer, Engine, find_difference, make_prompt
from tests.support.vllm.families import make_family
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.vision_families import QWEN35, QWEN35_MOE

ROUNDING = 0.25  # of log-probabilities, from bfloat16
DENSE, MOE, NEXT = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"
ALL_EXPERTS = {"num_experts_per_tok": 4}  # which ones, rounding could decide


@pytest.fixture(scope="module")
def prefix_npu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return an engine on one device that caches prefixes: states are kept at ends of blocks."""
    model = make_model(QWEN35, tmp_path_factory.mktemp("qwen3.5"))
    long = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "enable_prefix_caching": True}
    text = {**OPTIONS_OF[QWEN35]["hf_overrides"]["text_config"], "max_position_embeddings": 4096}
    yield from start(1, model, hf_overrides={"text_config": text}, **long)


def find_block_size(engine: Engine, rank: int) -> int:
    """Return at multiples of how many tokens states are kept."""
    return int(engine.llm.llm_engine.vllm_config.cache_config.block_size)


def answer_with_follower(
    engine: Engine, rank: int, prompt: list[int], cuts: Sequence[int] | None, keeps_places: bool = True
) -> list[Answer]:
    """Answer a prompt, cut there or unsplit, and then, unsplit, one that it begins; without remedy on request."""
    assert engine.llm.reset_prefix_cache()
    engine.llm.collective_rpc(_keep_places, args=(keeps_places,))
    first, _ = answer(engine, rank, [[prompt]], 1, cuts)
    engine.llm.collective_rpc(_keep_places, args=(True,))
    second, _ = answer(engine, rank, [[[*prompt, *make_prompt(70, 9)]]])
    return [*first, *second]


def _keep_places(worker: Any, keeps: bool) -> None:
    """Keep states of pieces where the step's is kept, or where builders would have them."""
    from dbo_runtime.vllm_plugin.context import splitter, states

    splitter.keep_places = states.keep_places if keeps else lambda common, slices, parts, size: parts


@pytest.mark.parametrize(("name", "sizes"), [(DENSE, {}), (NEXT, ALL_EXPERTS)])
def test_answers_are_those_of_transformers_and_split_steps_equal_to_unsplit_ones(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """On one device: what the operators of the stand-in compute, and what a cut leaves of it."""
    model, prompts = make_family(name, tmp_path, **sizes), make_prompts(5, 40, 130, 3, 64)
    for npus in start(1, model, **OPTIONS_OF[name]):
        ((found, _),) = npus.run(answer, [prompts], 6)
        assert measure_error(answer_in_float(model, prompts, 6), found) < 0.5  # what bf16 makes of it
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        for size in (128, 83):
            assert_chunks_are_equal(npus, 400, size)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(512,), (256, 1024)], ids=str)
def test_pieces_of_a_request_keep_its_state_where_its_prefix_is_cached(prefix_npu: Ranks, cuts: Sequence[int]) -> None:
    """In the block that the step ends in: there the next request with this prefix finds it."""
    (block,) = prefix_npu.run(find_block_size)
    prompt = make_prompt(2 * block, sum(cuts))
    (unsplit,) = prefix_npu.run(answer_with_follower, prompt, None)
    (split,) = prefix_npu.run(answer_with_follower, prompt, cuts)
    (lost,) = prefix_npu.run(answer_with_follower, prompt, cuts, False)
    for expected, found, misplaced in zip(unsplit, split, lost, strict=True):
        # Pieces round the state where they meet, as steps do.
        assert find_difference([expected], [found]) < ROUNDING < find_difference([expected], [misplaced])


@pytest.mark.slow
@pytest.mark.parametrize("name", [MOE, NEXT])
def test_quantized_weights_are_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    model = quantize_model(make_model(name, tmp_path / "source"), tmp_path / "quantized", DYNAMIC, DYNAMIC)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "quantization": "ascend", **OPTIONS_OF[name]}
    for npus in start(1, model, **options):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_cut_at_their_own_boundaries_are_equal_to_the_bit(tmp_path: Path) -> None:
    for npus in start(2, make_model(QWEN35_MOE, tmp_path), **OPTIONS_OF[QWEN35_MOE]):
        assert_ranks_cut_at_their_own_boundaries_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_of_different_sizes_are_equal_to_the_bit(tmp_path: Path) -> None:
    for npus in start(2, make_model(MOE, tmp_path), **OPTIONS_OF[MOE]):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), [(QWEN35, "mtp"), (QWEN35_MOE, "mtp"), (QWEN35, "ngram")])
def test_drafts_are_verified_as_unsplit(name: str, drafter: str, tmp_path: Path) -> None:
    """States of drafts that are rejected are left behind, split as unsplit."""
    model = make_model(name, tmp_path)
    drafts = add_qwen_mtp_layer(model) if drafter == "mtp" else {"speculative_config": NGRAM}
    options = {**drafts, "async_scheduling": False, "tensor_parallel_size": 2, **OPTIONS_OF[name]}
    for npus in start(1, model, enable_expert_parallel=name == QWEN35_MOE, **options):
        counts = assert_drafts_are_equal(npus, steps=8, accepts=False)
        assert counts["drafted"] > counts["accepted"]
        assert drafter == "ngram" or counts["accepted"] > 0  # what a random model says is not said before


@pytest.mark.slow
@pytest.mark.parametrize("name", [QWEN35, QWEN35_MOE])
def test_drafts_that_are_scheduled_asynchronously_are_verified_as_unsplit(name: str, tmp_path: Path) -> None:
    """With the host's corrections ordered after the copies: without, vllm-ascend's own answers vary (docs)."""
    model = make_model(name, tmp_path)
    options = {**add_qwen_mtp_layer(model), "async_scheduling": True, "tensor_parallel_size": 2, **OPTIONS_OF[name]}
    for npus in start(1, model, enable_expert_parallel=name == QWEN35_MOE, **options):
        npus.run(order_corrections)
        assert_drafts_are_equal(npus, steps=8)
