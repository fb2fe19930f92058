"""Models of each family that vllm-ascend serves, and the options that these need."""

from __future__ import annotations

from pathlib import Path

from tests.support.vllm.families import FAMILIES, LINEAR_ATTENTION, make_family
from tests.support.vllm.multimodal_families import INTERNVL, OMNI, make_internvl, make_omni
from tests.support.vllm.vision_families import KIMI, QWEN35, QWEN35_MOE, make_kimi, make_vision_family

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


def make_model(name: str, folder: Path) -> Path:
    if name == KIMI:
        return make_kimi(folder)
    if name == OMNI:
        return make_omni(folder)
    if name in INTERNS:
        return make_internvl(folder, INTERNS[name])
    return make_family(name, folder) if name in FAMILIES else make_vision_family(name, folder)
