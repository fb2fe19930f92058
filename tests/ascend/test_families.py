"""Every adapter of this repository inside vllm-ascend: split steps give what its own steps give, to the last bit.

DeepSeek V3 has tests of its own (`test_equivalence.py`), and so have encoders (`test_encoder.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ascend.engines import start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_nano_batches_are_equal,
    assert_prefills_are_equal,
    assert_the_sanitizer_finds_nothing,
)
from tests.support.ascend.families import INTERNS, OPTIONS_OF, make_model
from tests.support.ascend.jobs import count_divided
from tests.support.vllm.families import LINEAR_ATTENTION, make_family
from tests.support.vllm.multimodal_families import OMNI
from tests.support.vllm.vision_families import KIMI, QWEN3, QWEN3_MOE, QWEN25, QWEN35, QWEN35_MOE

FAST = ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
SLOW = (
    "DeepseekV2ForCausalLM",
    "Glm4MoeForCausalLM",
    "HYV3ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *INTERNS,
    KIMI,
    OMNI,
    QWEN25,
    QWEN3,
    QWEN3_MOE,
    *LINEAR_ATTENTION,
    QWEN35,
    QWEN35_MOE,
)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_split_steps_are_equal_to_unsplit_ones(name: str, tmp_path: Path) -> None:
    """Prefills, a request cut inside, decodes mixed with them, and nano-batches; one engine a family."""
    shared_out = "Moe" in name or name.startswith(("Deepseek", "Kimi", "Mixtral", "HYV3", "MiniMax"))
    model = make_model(name, tmp_path / "model")
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": shared_out, **OPTIONS_OF.get(name, {})}
    for npus in start(1, model, **options):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)
        assert_nano_batches_are_equal(npus)
        assert name not in FAST or min(npus.run(count_divided)[0]) > 0
        assert_the_sanitizer_finds_nothing(npus)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM"])
def test_tokens_are_dispatched_to_data_parallel_ranks(name: str, dispatch: str, tmp_path: Path) -> None:
    """The gate is the experts' own, or the block's."""
    model = make_family(name, tmp_path)
    for npus in start(2, model, {"DBO_DISPATCH": dispatch}, **OPTIONS_OF.get(name, {})):
        assert_data_parallel_prefills_are_close(npus, 0.0 if dispatch == "all_gather" else 0.1)
