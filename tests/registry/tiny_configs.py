"""A tiny config.json for each text architecture of vLLM's registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo_runtime.lab.verify.tiny_config import LAYERS, TINY, shrink
from tests.support.vllm.families import ATTENTION, EXPERTS, FAMILIES, LATENT, SIZES, VOCABULARY

WIDTH = TINY["hidden_size"]
# Names of sizes that only some architectures have, besides those of all. Windows are shorter than the prompts.
SIZES_BY_NAME: Mapping[str, int] = {
    **{name: size for name, size in TINY.items() if name != "first_k_dense_replace"},
    **dict.fromkeys(("num_query_groups", "multi_query_group_num", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("num_expert_group", "n_groups"), 1),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 64),
    "vocab_size_per_layer_input": VOCABULARY,
    "moe_num_experts": 4,
    "sliding_window": 16,
}
# What a config has whose class transformers does not have: as Llama's, and what its model asks for besides (below).
LLAMA_LIKE: Mapping[str, Any] = {
    **SIZES,
    **ATTENTION,
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MOE: Mapping[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "score_function": "softmax",
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "use_bias": False,
    "use_qkv_bias": False,
}
CHATGLM: Mapping[str, Any] = {
    "model_type": "chatglm",
    "num_layers": LAYERS,
    "padded_vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "ffn_hidden_size": 256,
    "kv_channels": 32,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 1024,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "original_rope": True,
}
PANGU_MOE: Mapping[str, Any] = {**MOE, **LATENT, "q_lora_rank": 64, "sandwich_norm": True}
# Models of latent attention that make their rotary embedding by the config's word for it; others take DeepSeek's yarn.
AS_IT_IS = ("HYV4ForCausalLM",)
EXTRA: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "Param2MoEForCausalLM", "SarvamMoEForCausalLM"), MOE
    ),
    "BailingMoeV2_5ForCausalLM": {
        **MOE,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
    "BailingMoeV3ForCausalLM": {
        **MOE,
        **LATENT,
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "q_lora_rank": 64,
    },
    "SarvamMLAForCausalLM": {**MOE, **LATENT, "q_lora_rank": None},
    "ChatGLMForConditionalGeneration": CHATGLM,
    "ChatGLMModel": CHATGLM,
    "DeciLMForCausalLM": {
        "block_configs": [
            {
                "attention": {
                    "no_op": False,
                    "n_heads_in_group": 2,
                    "num_key_value_heads": 2,
                    "replace_with_linear": False,
                },
                "ffn": {"no_op": False, "ffn_mult": 2.0, "replace_with_linear": False},
            },
        ]
        * LAYERS,
    },
    "DeepseekForCausalLM": {**MOE, "scoring_func": "softmax", "n_group": None, "topk_group": None},
    "ExaoneForCausalLM": {"num_layers": LAYERS, "activation_function": "silu", "layer_norm_epsilon": 1e-6},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma4ForCausalLM": {"per_layer_config": None, "num_kv_shared_layers": 0},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "ExaoneMoeForCausalLM": {"sliding_windows": [16] * LAYERS},
    "DbrxForCausalLM": {"rope_theta": 10000.0},
    "IQuestLoopCoderForCausalLM": {"loop_num": 2, "loop_window_size": 16, "max_window_layers": LAYERS},
    "MiMoV2ForCausalLM": {
        **MOE,
        "attention_bias": False,
        "hybrid_layer_pattern": [0, 1] * 2,
        "layernorm_epsilon": 1e-6,
        "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": 16,
        "swa_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 32,
        "swa_v_head_dim": 32,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "MiniCPMForCausalLM": {
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 12,
        "num_experts": 0,
        "num_experts_per_tok": 0,
    },
    "K2HorizonForCausalLM": {
        **MOE,
        "attention_bias": False,
        "attention_gate_func": "sigmoid",
        "decoder_sparse_step": 1,
        "layernorm_num_groups": 1,
        "mlp_only_layers": [0],
        "moe_gate_bias": False,
        "mova_num_experts": 2,
        "mova_num_experts_per_tok": 1,
        "query_key_norm": True,
        "rope_head_dim": 32,
        "router_scaling_factor": 1.0,
        "router_score_func": "softmax",
    },
    "PanguEmbeddedForCausalLM": {},
    "PanguProMoEV2ForCausalLM": PANGU_MOE,
    "PanguUltraMoEForCausalLM": PANGU_MOE,
    "PhiMoEForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
    },
    "Rnj1ForCausalLM": {
        "attention_bias": False,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["full_attention"] * LAYERS,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
    },
    "SolarForCausalLM": {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
    "Step1ForCausalLM": {"num_attention_groups": 2},
    "Step3TextForCausalLM": {
        "model_type": "step3_text",
        "max_position_embedding": 1024,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "norm_expert_weight": True,
        "share_expert_dim": 64,
        "share_q_dim": 64,
        "moe_layers_enum": "1,2,3",
    },
    "Step3p5ForCausalLM": {
        "model_type": "step3p5",
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "moe_intermediate_size": 64,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "norm_expert_weight": True,
        "num_attention_groups": 2,
        "share_expert_dim": 64,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 4,
            "num_attention_groups": 2,
            "head_dim": 32,
        },
        "sliding_window": 16,
        "use_moe_router_bias": True,
    },
    "TeleChat2ForCausalLM": {"n_head": 4},
    "TeleFLMForCausalLM": {"input_mult": 1.0, "mup_scale_factor": 1.0, "output_mult": 1.0, "use_mup": True},
    "Plamo3ForCausalLM": {
        "interleaved_sliding_window": [None, 16] * 2,
        "rope_local_theta": 10000.0,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
}


# Further tiny models of an architecture, of which one alone would tell half: by a name, what their configs differ in.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma4ForCausalLM without per-layer inputs": {"hidden_size_per_layer_input": 0},
}


def list_trials() -> list[str]:
    """Return the text architectures that vLLM registers, and the names of further models of some of them."""
    return sorted([*list_architectures(), *VARIANTS])


def list_architectures() -> list[str]:
    """Return the text architectures that vLLM registers."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return sorted(_TEXT_GENERATION_MODELS)


def make_config(name: str) -> dict[str, Any]:
    """Return a config with few, narrow layers, of which all kinds that the family has are there.

    *name* is that of an architecture, or of a variant of its model.
    """
    from transformers import AutoConfig

    architecture = name.partition(" ")[0]
    if architecture in FAMILIES:
        family = FAMILIES[architecture]
        content = AutoConfig.for_model(family.model_type, **{**SIZES, **family.config}).to_dict()
    else:
        content = shrink(get_defaults(architecture), SIZES_BY_NAME, factors=())
    content |= {**EXTRA.get(architecture, {}), "architectures": [architecture], "torch_dtype": "float32"}
    content |= VARIANTS.get(name, {})
    if content.get("kv_lora_rank"):  # vLLM's rotary kernel for CPU is wrong for MLA without DeepSeek's yarn
        yarn = {**LATENT["rope_scaling"], "rope_type": "deepseek_yarn" if architecture in AS_IT_IS else "yarn"}
        content |= {"rope_scaling": None, "rope_parameters": yarn}
    return content


def get_defaults(architecture: str) -> dict[str, Any]:
    """Return the defaults of the config class that transformers has for an architecture, or a Llama's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    types = [kind for kind, names in NAMES.items() if architecture in ((names,) if isinstance(names, str) else names)]
    for kind in sorted(types, key=lambda kind: not kind.endswith("_text")):  # others hold that of the text in them
        if kind in CONFIG_MAPPING:
            return {**CONFIG_MAPPING[kind]().to_dict(), "model_type": CONFIG_MAPPING[kind].model_type}
    return {**LLAMA_LIKE, "model_type": "llama"}
