"""Steps whose MoE communication is in MC2's kernels, with tensor parallel, on A3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.engines import FOUR, OPTIONS, TINY, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.modelslim import quantize_model
from tests.support.ascend.options import A3, FUSED
from tests.support.vllm.engine import find_difference
from tests.support.vllm.families import make_family

PREFILL: dict[str, Any] = {"enable_prefill_mc2": True}
DEEPSEEK, QWEN = "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"
CASES = [
    (name, kind, is_quantized) for name in (DEEPSEEK, QWEN) for kind in (FUSED, PREFILL) for is_quantized in (0, 1)
]


def make_options(name: str, kind: dict[str, Any], is_quantized: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a tiny model, in int8 or bf16; return it and the options of its engine."""
    source = TINY if name == DEEPSEEK else make_family(name, folder / "source", mlp_only_layers=[])
    options = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "additional_config": {**OPTIONS["additional_config"], **kind},
    }
    if not is_quantized:
        return source, options
    return quantize_model(source, folder / "quantized"), {**options, "quantization": "ascend"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "is_quantized"), CASES)
def test_split_steps_are_equal_to_unsplit_ones(
    name: str, kind: dict[str, Any], is_quantized: int, tmp_path: Path
) -> None:
    """Prefills, a request cut inside, and decodes mixed with them, of odd sizes, whose chunks differ."""
    model, options = make_options(name, kind, is_quantized, tmp_path)
    for npus in start(1, model, A3, **options):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_quantized"), [(FUSED, 1), (PREFILL, 0)])
def test_data_parallel_ranks_of_different_sizes_are_equal(
    kind: dict[str, Any], is_quantized: int, tmp_path: Path
) -> None:
    """Kernels of all four ranks take as many rows, those of the largest chunk; they leave padding as it is."""
    model, options = make_options(DEEPSEEK, kind, is_quantized, tmp_path)
    prompts = [make_prompts(40, 30, 25, 5), make_prompts(40, 20)]
    for npus in start(2, model, {**FOUR, **A3, "DBO_CHECK": "1"}, **options):
        unsplit_by_rank = npus.run(answer, prompts)
        splits = npus.run(answer, prompts, 1, [[40], [40]])
        for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
            assert [count["split"] for count in counts] == [1] * len(counts), counts
            assert find_difference(unsplit, split) == 0.0
