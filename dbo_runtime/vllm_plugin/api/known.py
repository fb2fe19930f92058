"""What is supported and proven: plain constants, which the doctor reads without vLLM and torch."""

from __future__ import annotations

from typing import NamedTuple

TESTED_VLLM_VERSIONS = ((0, 30), (0, 32))
"""vLLM releases that passed all suites of `make test-compat`, or of `make test`; see compat/results.json."""

VLLM_WINDOW = ((0, 23), (0, 34))
"""The first vLLM release whose steps are split, and the first one after the window. The extra `vllm` is the same."""

HYBRID_MODELS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models with linear attention whose split steps have been compared with unsplit ones."""

COMPARED_DRAFTERS = (
    "ngram",
    "suffix",
    "draft_model",
    "deepseek_mtp",
    "glm4_moe_mtp",
    "qwen3_5_mtp",
    "eagle",
    "eagle3",
)
"""Methods of speculative decoding, as named by `name_drafter`, with which split steps have been compared with unsplit
ones: all but `suffix`, which drafts on the host as `ngram` does."""

SPARSE_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Models with sparse attention whose split steps have been compared with unsplit ones."""

STABLE_ASCEND_MODELS = (
    *SPARSE_MODELS,
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Glm4MoeForCausalLM",
    "InternVLChatModel",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models whose split steps have been compared with unsplit ones on vllm-ascend 0.23.0.post1, and on 0.30.0rc2."""

ASCEND_MODELS = (
    *STABLE_ASCEND_MODELS,
    "DeepseekV41ForCausalLM",
    "Glm5NextForConditionalGeneration",
    "HYV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Models whose split steps have been compared with unsplit ones on vllm-ascend 0.30.0rc2."""


class Proven(NamedTuple):
    """Configurations of a vllm-ascend release whose split steps have been compared with unsplit ones.

    Attributes:
        models: architectures.
        quantizations: quantizations of weights and indexers, in ModelSlim's names, and of caches.
        drafters: methods of speculative decoding. `suffix` drafts on the host, as `ngram` does.
        encoders: class names of vision encoders.
        compared_options: options of vllm-ascend with which first steps are compared, whatever the model.
    """

    models: tuple[str, ...]
    quantizations: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()
    compared_options: tuple[str, ...] = ()


LATEST_ASCEND = "0.30.0rc2"
"""The vllm-ascend release with most comparisons. Other releases are judged by it under DBO_CHECK=1."""

PROVEN_ON_ASCEND = {
    LATEST_ASCEND: Proven(
        ASCEND_MODELS,
        quantizations=(
            "INT8_DYNAMIC",
            "W4A8_DYNAMIC",
            "W8A8",
            "W8A8_DYNAMIC",
            "int8 cache of an indexer",
            "int8 cache of sparse attention",
        ),
        drafters=("ngram", "suffix", "deepseek_mtp", "glm4_moe_mtp", "glm5_next_mtp", "qwen3_5_mtp", "eagle3"),
        encoders=("Qwen2_5_VisionTransformer", "Qwen3_VisionTransformer"),
    ),
    "0.23.0.post1": Proven(
        STABLE_ASCEND_MODELS,
        quantizations=("W4A8_DYNAMIC", "W8A8", "W8A8_DYNAMIC"),
        drafters=("ngram", "suffix", "deepseek_mtp", "qwen3_5_mtp"),
        compared_options=("enable_flashcomm1", "enable_fused_mc2", "enable_shared_expert_dp"),
    ),
}
"""Proven configurations by vllm-ascend release. With other releases, steps are split only under DBO_CHECK=1."""

MODEL_REGISTRY = "model_executor/models/registry.py"
"""The file in vLLM's package that lists the architectures it serves, each in quotation marks."""

MOE_METHODS = ("UnquantizedFusedMoEMethod",)
"""vLLM classes that apply the weights of experts by calling the kernel, and do nothing else."""

REDUCING_NORMS = ("MiniMaxText01RMSNormTP",)
"""vLLM's norm classes for values divided over tensor parallel ranks. They all-reduce sums of squares."""
