"""Kimi-K3 inside vllm-ascend: steps in nano-batches give what its own steps give, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ascend.engines import FOUR, start
from tests.support.ascend.equivalence import (
    assert_data_parallel_nano_batches_are_equal,
    assert_mixed_nano_batches_are_equal,
    assert_nano_batches_are_equal,
)
from tests.support.ascend.jobs import answer, answer_in_nano_batches, make_prompts
from tests.support.ascend.kimi_k3 import ENVIRONMENT, TEXT_ONLY, make_kimi_k3
from tests.support.ascend.modelslim import DYNAMIC, quantize_model
from tests.support.ascend.options import GRAPHS
from tests.support.ascend.sparse_attention import share_out
from tests.support.vllm.engine import find_difference

AUTO = {"DBO_SPLIT": "auto", **ENVIRONMENT}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_nano_batches_are_equal_to_unsplit_steps(workers: int, tmp_path: Path) -> None:
    """With two workers, layers hand on a chunk of the tokens each."""
    for npus in start(1, make_kimi_k3(tmp_path), AUTO, **share_out(workers), **TEXT_ONLY):
        assert_nano_batches_are_equal(npus)
        assert_mixed_nano_batches_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_data_parallel_ranks_are_equal(workers: int, tmp_path: Path) -> None:
    for npus in start(2, make_kimi_k3(tmp_path), {**AUTO, **FOUR}, **TEXT_ONLY, tensor_parallel_size=workers):
        assert_data_parallel_nano_batches_are_equal(npus)


@pytest.mark.slow
def test_quantized_weights(tmp_path: Path) -> None:
    model = quantize_model(make_kimi_k3(tmp_path / "source"), tmp_path / "model", DYNAMIC, DYNAMIC)
    for npus in start(1, model, AUTO, **share_out(2), **TEXT_ONLY):
        assert_nano_batches_are_equal(npus)
        assert_mixed_nano_batches_are_equal(npus)


@pytest.mark.slow
def test_with_graphs_of_decodes_prefills_are_split(tmp_path: Path) -> None:
    prompts = [make_prompts(60, 40, 25)]
    for npus in start(1, make_kimi_k3(tmp_path), AUTO, **{**TEXT_ONLY, **GRAPHS}):
        ((unsplit, _),) = npus.run(answer, prompts, 6)
        ((nano, steps),) = npus.run(answer_in_nano_batches, prompts, 6, 2)
        assert steps == [1], "a prefill; five decodes are replayed"
        assert find_difference(unsplit, nano) == 0.0
