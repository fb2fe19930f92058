"""Gated linear attention inside vllm-ascend, beyond `test_families.py`: is it right, quantized, with drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ascend.conftest import start
from tests.ascend.jobs import answer, make_prompts, order_corrections
from tests.ascend.modelslim import DYNAMIC, quantize_model
from tests.ascend.mtp_layers import add_qwen_mtp_layer
from tests.ascend.reference import answer_in_float, measure_error
from tests.ascend.test_equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.ascend.test_families import OPTIONS_OF, make_model
from tests.ascend.test_speculative import answer_with_drafts
from tests.vllm_plugin.drafters import NGRAM
from tests.vllm_plugin.engine import Engine, find_difference
from tests.vllm_plugin.vision_families import QWEN35, QWEN35_MOE

DENSE, MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"


def list_statistics(engine: Engine, rank: int) -> list[dict[str, Any]]:
    return engine.statistics()


def test_answers_are_those_of_transformers_and_split_steps_equal_to_unsplit_ones(tmp_path: Path) -> None:
    """On one device: what the operators of the stand-in compute, and what a cut leaves of it."""
    model, prompts = make_model(DENSE, tmp_path), make_prompts(5, 40, 130, 3, 64)
    for npus in start(1, model, **OPTIONS_OF[DENSE]):
        ((found, _),) = npus.run(answer, [prompts], 6)
        assert measure_error(answer_in_float(model, prompts, 6), found) < 0.5  # what bf16 makes of it
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        for size in (128, 83):
            assert_chunks_are_equal(npus, 400, size)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
def test_quantized_weights_are_equal_to_the_bit(tmp_path: Path) -> None:
    model = quantize_model(make_model(MOE, tmp_path / "source"), tmp_path / "quantized", DYNAMIC, DYNAMIC)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "quantization": "ascend", **OPTIONS_OF[MOE]}
    for npus in start(1, model, **options):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_are_equal_to_the_bit(tmp_path: Path) -> None:
    for npus in start(2, make_model(MOE, tmp_path), **OPTIONS_OF[MOE]):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), [(QWEN35, "mtp"), (QWEN35_MOE, "mtp"), (DENSE, "ngram")])
def test_drafts_are_verified_as_unsplit(name: str, drafter: str, tmp_path: Path) -> None:
    """States of drafts that are rejected are left behind, split as unsplit."""
    model = make_model(name, tmp_path)
    drafts = add_qwen_mtp_layer(model) if drafter == "mtp" else {"speculative_config": NGRAM}
    options = {**drafts, "async_scheduling": False, "tensor_parallel_size": 2, **OPTIONS_OF[name]}
    for npus in start(1, model, enable_expert_parallel=name == QWEN35_MOE, **options):
        ((unsplit, counts, none),) = npus.run(answer_with_drafts, False)
        ((split, split_counts, steps),) = npus.run(answer_with_drafts, True)
        assert (none, steps >= 8) == (0, True)
        assert counts["drafted"] > counts["accepted"]
        assert drafter == "ngram" or counts["accepted"] > 0  # what a random model says is not said before
        assert split_counts == counts
        assert find_difference(unsplit, split) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [QWEN35, QWEN35_MOE])
def test_drafts_that_are_scheduled_asynchronously_are_verified_as_unsplit(name: str, tmp_path: Path) -> None:
    """With the host's corrections ordered after the copies: without, vllm-ascend's own answers vary (docs)."""
    model = make_model(name, tmp_path)
    options = {**add_qwen_mtp_layer(model), "async_scheduling": True, "tensor_parallel_size": 2, **OPTIONS_OF[name]}
    for npus in start(1, model, enable_expert_parallel=name == QWEN35_MOE, **options):
        npus.run(order_corrections)
        ((unsplit, counts, none),) = npus.run(answer_with_drafts, False)
        ((split, split_counts, steps),) = npus.run(answer_with_drafts, True)
        assert (none, steps >= 8) == (0, True)
        assert counts["drafted"] > counts["accepted"] > 0
        assert split_counts == counts
        assert find_difference(unsplit, split) == 0.0
