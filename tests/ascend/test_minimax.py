"""MiniMax-M3 inside vllm-ascend: split steps give what its own steps give, bit for bit.

Of up to four blocks of keys, its indexer chooses two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.drafts import assert_drafts_are_equal
from tests.support.ascend.engines import FOUR, PIPELINE, start
from tests.support.ascend.equivalence import assert_data_parallel_prefills_are_close
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.minimax import TEXT_ONLY, describe_vision_tower, draft_by_eagle3, make_minimax
from tests.support.ascend.modelslim import DYNAMIC, STATIC, quantize_model
from tests.support.ascend.options import FLASHCOMM, REPLICATED, TWO
from tests.support.ascend.sparse_attention import QUANTIZED, assert_steps_are_equal, share_out
from tests.support.vllm.engine import find_difference


@pytest.mark.slow
def test_split_steps_are_equal_to_unsplit_ones(tmp_path: Path) -> None:
    for npus in start(1, make_minimax(tmp_path), **share_out(2), **TEXT_ONLY):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_drafts_are_verified_in_chunks_of_tokens(tmp_path: Path) -> None:
    """FlashComm v1, in which the dense MLP, too, gathers a chunk, and an Eagle3 head that reads gathered tokens."""
    drafting = draft_by_eagle3(3, tmp_path / "drafter")
    for npus in start(1, make_minimax(tmp_path / "model"), **TWO, **FLASHCOMM, **drafting, **TEXT_ONLY):
        assert_drafts_are_equal(npus, accepts=False)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [STATIC, DYNAMIC])
def test_quantized_weights(attention: str, tmp_path: Path) -> None:
    model = quantize_model(make_minimax(tmp_path / "source"), tmp_path / "model", attention, DYNAMIC)
    describe_vision_tower(model)
    for npus in start(1, model, **TWO, **QUANTIZED, **TEXT_ONLY):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED])
def test_layers_that_pass_on_chunks_of_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    """FlashComm v1: the dense MLP, too, gathers a chunk and reduces its results to one."""
    for npus in start(1, make_minimax(tmp_path), **TWO, **options, **TEXT_ONLY):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_of_different_sizes_are_equal(tmp_path: Path) -> None:
    for npus in start(2, make_minimax(tmp_path), **TEXT_ONLY):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED])
def test_data_parallel_ranks_of_chunks_are_equal(options: dict[str, Any], tmp_path: Path) -> None:
    for npus in start(2, make_minimax(tmp_path), FOUR, tensor_parallel_size=2, **options, **TEXT_ONLY):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
def test_stages_pass_on_all_tokens(tmp_path: Path) -> None:
    """Layers have chunks of them, which a stage gathers at its end."""
    for npus in start(1, make_minimax(tmp_path), FOUR, **TWO, **{**TEXT_ONLY, **PIPELINE}, **FLASHCOMM):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_what_is_answered_depends_on_the_chosen_blocks(tmp_path: Path) -> None:
    """Of four, another indexer chooses others."""
    found = []
    for seed in (None, 1):
        for npus in start(1, make_minimax(tmp_path / str(seed), indexer_seed=seed), **TEXT_ONLY):
            ((answers, _),) = npus.run(answer, [make_prompts(500)])
            found.append(answers)
    assert find_difference(*found) > 0.0
