"""Every adapter of this repository inside vllm-ascend: split steps give what its own steps give, to the last bit.

DeepSeek V3 has tests of its own (`test_equivalence.py`), and so have encoders (`test_encoder.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.conftest import start
from tests.ascend.test_equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
    assert_the_sanitizer_finds_nothing,
)
from tests.support.vllm.families import FAMILIES, LINEAR_ATTENTION, make_family
from tests.support.vllm.multimodal_families import INTERNVL, OMNI, make_internvl, make_omni
from tests.support.vllm.vision_families import (
    KIMI,
    QWEN3,
    QWEN3_MOE,
    QWEN25,
    QWEN35,
    QWEN35_MOE,
    make_kimi,
    make_vision_family,
)

INTERNS = {f"{INTERNVL}-{name}": name for name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")}
# vllm-ascend looks for it where transformers 4 had it; of transformers 5, vLLM reads `rope_parameters`.
QUARTER = {"partial_rotary_factor": 0.25}
OPTIONS_OF = {
    "Glm4MoeForCausalLM": {"hf_overrides": {"partial_rotary_factor": 0.5}},
    **{name: {"hf_overrides": QUARTER} for name in LINEAR_ATTENTION},
    **{name: {"hf_overrides": {"text_config": QUARTER}} for name in (QWEN35, QWEN35_MOE)},
    KIMI: {"language_model_only": True},
    OMNI: {"language_model_only": True},
    "MiniMaxM2ForCausalLM": {"hf_overrides": {"scoring_func": "sigmoid"}},
    **{name: {"language_model_only": True, "trust_remote_code": True} for name in INTERNS},
}
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
    """Prefills, a request cut inside, and decodes mixed with them; one engine a family, its experts shared out."""
    shared_out = "Moe" in name or name.startswith(("Deepseek", "Kimi", "Mixtral", "HYV3", "MiniMax"))
    model = make_model(name, tmp_path / "model")
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": shared_out, **OPTIONS_OF.get(name, {})}
    for npus in start(1, model, **options):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)
        assert_the_sanitizer_finds_nothing(npus)


def make_model(name: str, folder: Path) -> Path:
    if name == KIMI:
        return make_kimi(folder)
    if name == OMNI:
        return make_omni(folder)
    if name in INTERNS:
        return make_internvl(folder, INTERNS[name])
    return make_family(name, folder) if name in FAMILIES else make_vision_family(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM"])
def test_tokens_are_dispatched_to_data_parallel_ranks(name: str, dispatch: str, tmp_path: Path) -> None:
    """The gate is the experts' own, or the block's."""
    model = make_family(name, tmp_path)
    for npus in start(2, model, {"DBO_DISPATCH": dispatch}, **OPTIONS_OF.get(name, {})):
        assert_data_parallel_prefills_are_close(npus, 0.0 if dispatch == "all_gather" else 0.1)
