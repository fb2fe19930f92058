"""What is known and proven: plain constants, which the doctor reads without vLLM and without torch."""

from __future__ import annotations

from typing import NamedTuple

TESTED_VLLM_VERSIONS = ((0, 30), (0, 32))
"""Releases of vLLM on which all suites of `make test-compat` passed, or of `make test`; see compat/results.json."""

VLLM_WINDOW = ((0, 23), (0, 34))
"""The first release of vLLM that is split, and the first after it that is not; so is the extra `vllm`."""

HYBRID_MODELS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models with linear attention of which split steps have been compared with unsplit ones."""

ASCEND_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmMoeDsaForCausalLM",
    "HYV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    *HYBRID_MODELS,
)
"""Models of which split steps have been compared with unsplit ones on vllm-ascend."""


class Proven(NamedTuple):
    """With what split steps have been compared with unsplit ones on a release of vllm-ascend.

    Attributes:
        models: architectures.
        quantizations: of weights, as ModelSlim names them.
        drafters: methods of speculative decoding; `suffix` drafts on the host, as `ngram` does.
    """

    models: tuple[str, ...]
    quantizations: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()


LATEST_ASCEND = "0.30.0rc2"

PROVEN_ON_ASCEND = {
    LATEST_ASCEND: Proven(
        ASCEND_MODELS,
        quantizations=("W4A8_DYNAMIC", "W8A8", "W8A8_DYNAMIC"),
        drafters=("ngram", "suffix", "deepseek_mtp", "qwen3_5_mtp", "eagle3"),
    ),
}
"""By release of vllm-ascend; others are not split."""

MOE_METHODS = ("UnquantizedFusedMoEMethod",)
"""Classes of vLLM's that apply the weights of experts by calling the kernel, and do nothing else."""
