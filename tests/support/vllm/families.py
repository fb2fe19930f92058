"""Tiny models of many families, made from a config: real layers, random weights that keep activations alive."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

TINY = Path(__file__).parents[3] / "examples" / "tiny-deepseek"  # whose tokenizer all share
VOCABULARY = 320
LAYERS = 3

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA4_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
SHARED_EXPERT = {"shared_expert_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1}
LINEAR = {  # a layer of each kind in both halves: vLLM wants that of stages of a pipeline
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
LATENT = {  # MLA, in the sizes that vLLM's CPU kernel decodes
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # vLLM's rotary kernel for CPU is wrong for MLA without yarn.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    },
}

INDEXED = {  # MLA, and an indexer
    **LATENT,
    "q_lora_rank": 64,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 2048,
    "mlp_layer_types": ["dense", "sparse", "sparse"],  # transformers 5.5 does not find them from the number above
}


class Family(NamedTuple):
    """What a family is called by transformers, and what its config has besides `SIZES`."""

    model_type: str
    config: dict[str, Any]


IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}  # where defaults are outside the vocabulary
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES = {  # by architecture
    "LlamaForCausalLM": Family("llama", ATTENTION),
    "MistralForCausalLM": Family("mistral", {**ATTENTION, "sliding_window": None}),
    "Qwen2ForCausalLM": Family("qwen2", {**ATTENTION, "use_sliding_window": False}),
    "Qwen3ForCausalLM": Family("qwen3", ATTENTION),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", {**ATTENTION, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {
            **ATTENTION,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "HYV3ForCausalLM": Family(
        "hy_v3",
        {
            **ATTENTION,
            **EXPERTS,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "expert_hidden_dim": 64,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral", {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        {
            **ATTENTION,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "rotary_dim": 16,
            "use_routing_bias": True,
            "scoring_func": "softmax",  # of published ones sigmoid, which vLLM's CPU kernel lacks without groups
        },
    ),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", {**LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc"}),
    "DeepseekV32ForCausalLM": Family("deepseek_v32", INDEXED),
    "GlmMoeDsaForCausalLM": Family("glm_moe_dsa", INDEXED),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", {"pad_token_id": None, **ATTENTION, **LINEAR, **EXPERTS, **SHARED_EXPERT}
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", {**ATTENTION, **LINEAR}),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", {**ATTENTION, **LINEAR, **EXPERTS, **SHARED_EXPERT}),
    "CohereForCausalLM": Family("cohere", {**ATTENTION, **IDS, "use_qk_norm": True}),
    "Cohere2ForCausalLM": Family("cohere2", {**ATTENTION, **SLIDING, **IDS}),
    "Exaone4ForCausalLM": Family("exaone4", {**ATTENTION, **SLIDING, "sliding_window_pattern": 2}),
    "Gemma2ForCausalLM": Family(
        "gemma2", {**ATTENTION, **SLIDING, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
    ),
    "Gemma3ForCausalLM": Family("gemma3_text", {**ATTENTION, **SLIDING, "query_pre_attn_scalar": 32}),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        {
            **ATTENTION,
            **SLIDING,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            **GEMMA4_EXPERTS,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        {
            **ATTENTION,
            **SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 256,
                "truncate": False,
            },
        },
    ),
    "Glm4ForCausalLM": Family("glm4", {**ATTENTION, **IDS}),
    "GraniteForCausalLM": Family(
        "granite", {**ATTENTION, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    ),
}
LINEAR_ATTENTION = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Those with linear attention in most layers; vLLM's kernels for it on CPU take bfloat16 only."""
ONLY_BFLOAT16 = ("GptOssForCausalLM",)
"""Those with attention sinks, which vLLM's kernel for CPU takes in bfloat16 only."""

LATER = {"deepseek_v32": "glm_moe_dsa"}
"""Types of models that transformers 5.5 lacks, each with one whose weights have the same names."""

SPARSE_ATTENTION = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Those whose attention sees keys that an indexer chooses; vLLM has no kernels for it on CPU."""

MINIMAX_M3 = "MiniMaxM3SparseForConditionalGeneration"
OF_ASCEND = (  # whose classes of vllm-ascend's are split
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
)
"""Which vLLM has no class for on CPU; tests/support/ascend/minimax.py makes one."""


def find_backend(architecture: str) -> str:
    """Return the attention backend that serves an architecture in fp32 on any CPU."""
    return "CPU_MLA" if architecture.startswith("Deepseek") else "CPU_ATTN"


def make_family(architecture: str, directory: Path, seed: int = 0, **sizes: Any) -> Path:
    """Write config, tokenizer and weights of a model of that architecture; return *directory*.

    It is tiny unless *sizes* say otherwise.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    wanted, extra = FAMILIES[architecture]
    model_type = wanted if wanted in CONFIG_MAPPING else LATER[wanted]
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    config = AutoConfig.for_model(model_type, **{**SIZES, **extra, **sizes})
    config.architectures = [architecture]
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + 0.1 * noise
    model.save_pretrained(directory)
    if model_type != wanted:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": wanted}))
    return directory
