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

SPARSE_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Models with sparse attention of which they have been."""

ASCEND_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Glm4MoeForCausalLM",
    "HYV3ForCausalLM",
    "InternVLChatModel",
    "KimiK25ForConditionalGeneration",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    *HYBRID_MODELS,
    *SPARSE_MODELS,
)
"""Models of which split steps have been compared with unsplit ones on vllm-ascend."""


class Proven(NamedTuple):
    """With what split steps have been compared with unsplit ones on a release of vllm-ascend.

    Attributes:
        models: architectures.
        quantizations: of weights and indexers, as ModelSlim names them, and of caches.
        drafters: methods of speculative decoding; `suffix` drafts on the host, as `ngram` does.
        encoders: classes of vision encoders.
    """

    models: tuple[str, ...]
    quantizations: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()


LATEST_ASCEND = "0.30.0rc2"
"""The release of vllm-ascend that most was compared with, and by which others are judged under DBO_CHECK=1."""

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
        drafters=("ngram", "suffix", "deepseek_mtp", "glm4_moe_mtp", "qwen3_5_mtp", "eagle3"),
        encoders=("Qwen2_5_VisionTransformer", "Qwen3_VisionTransformer"),
    ),
    "0.23.0.post1": Proven(("DeepseekV3ForCausalLM",)),
}
"""By release of vllm-ascend; with others, steps are split under DBO_CHECK=1 only."""

MODEL_REGISTRY = "model_executor/models/registry.py"
"""The file of vLLM's package that names the architectures it serves, each in quotation marks."""

MOE_METHODS = ("UnquantizedFusedMoEMethod",)
"""Classes of vLLM's that apply the weights of experts by calling the kernel, and do nothing else."""

REDUCING_NORMS = ("MiniMaxText01RMSNormTP",)
"""Classes of vLLM's norms of values that are divided over tensor parallel ranks: they all-reduce sums of squares."""
