"""Weights in int8, and experts in int4, inside vllm-ascend: split steps give what its own steps give, to the last bit.

Products of integers are exact, and activations are quantized token by token, so nothing depends on the batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_tasks import held_out
from tests.support.ascend.engines import TINY, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.support.ascend.jobs import answer
from tests.support.ascend.modelslim import DYNAMIC, INT4, STATIC, quantize_model
from tests.support.ascend.reference import count_equal, tokenize
from tests.support.vllm.families import make_family

QUANTIZED = {"quantization": "ascend"}


DEEPSEEK, OTHERS = "DeepseekV3ForCausalLM", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
CASES = [
    (DEEPSEEK, DYNAMIC, DYNAMIC),
    *((name, attention, DYNAMIC) for name in OTHERS for attention in (STATIC, DYNAMIC)),
    *((name, STATIC, INT4) for name in (DEEPSEEK, "Qwen3MoeForCausalLM")),
]


@pytest.mark.parametrize(
    ("name", "attention", "experts"),
    [(DEEPSEEK, STATIC, DYNAMIC), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_split_steps_are_equal_to_unsplit_ones(name: str, attention: str, experts: str, tmp_path: Path) -> None:
    """Prefills, a request cut inside, and decodes mixed with them; one engine a family, its experts shared out."""
    # Qwen3-MoE without the dense layers that some have: vllm-ascend 0.30.0rc2 cannot load those in int8.
    sizes = {"mlp_only_layers": []} if name.startswith("Qwen3Moe") else {}
    source = TINY if name == DEEPSEEK else make_family(name, tmp_path / "source", **sizes)
    model = quantize_model(source, tmp_path / "quantized", attention, experts)
    shared_out = name != "Qwen3ForCausalLM"
    for npus in start(1, model, tensor_parallel_size=2, enable_expert_parallel=shared_out, **QUANTIZED):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.parametrize(
    ("dispatch", "experts"),
    [
        ("all_gather", DYNAMIC),
        pytest.param("all_gather", INT4, marks=pytest.mark.slow),
        pytest.param("all_to_all", DYNAMIC, marks=pytest.mark.slow),
    ],
)
def test_experts_of_data_parallel_ranks_get_the_tokens_in_int8(dispatch: str, experts: str, tmp_path: Path) -> None:
    """Half as many bytes as in bf16, and the same answers; all-to-all adds two ranks' results in another order."""
    model = quantize_model(TINY, tmp_path / "quantized", experts=experts)
    tasks = tokenize(TINY, [task.prompt for task in held_out(4)])
    for npus in start(2, model, {"DBO_DISPATCH": dispatch}, **QUANTIZED):
        assert_data_parallel_prefills_are_close(npus, 0.0 if dispatch == "all_gather" else 0.1)
        unsplit_by_rank = npus.run(answer, [tasks[:10], tasks[10:14]], 8)
        splits = npus.run(answer, [tasks[:10], tasks[10:14]], 8, [])
        for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
            assert counts[0]["split"] >= 6, counts
            assert count_equal(unsplit, split) == len(unsplit)
