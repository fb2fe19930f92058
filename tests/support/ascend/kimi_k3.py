"""A tiny Kimi-K3 with random weights. It is served without its encoder.

Two of its layers have linear attention (KDA), two latent attention without rotary parts; both have output gates. The
first layer has a dense MLP, the others experts on a projection of the tokens (latent MoE). Every two layers are a block
of the attention residuals.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.vllm.families import TINY, VOCABULARY

KIMI_K3 = "KimiK3ForConditionalGeneration"
HIDDEN, INNER, EXPERTS, LATENT = 128, 64, 4, 64
LINEAR = [True, True, False, True, False]  # whether a layer has linear attention
BLOCK = 2  # layers
LINEAR_HEADS, LINEAR_SIZE, TAPS = 4, 128, 4  # vllm-ascend's kernels know no other size
HEADS, SIZE, UNCACHED, RANK, QUERY_RANK = 4, 128, 64, 512, 64
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": len(LINEAR),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": UNCACHED,
    "v_head_dim": SIZE,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [number for number, is_linear in enumerate(LINEAR, 1) if is_linear],
        "full_attn_layers": [number for number, is_linear in enumerate(LINEAR, 1) if not is_linear],
        "head_dim": LINEAR_SIZE,
        "num_heads": LINEAR_HEADS,
        "short_conv_kernel_size": TAPS,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "attn_res_block_size": BLOCK,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": [KIMI_K3],
    "text_config": TEXT,
    "vision_config": {"text_hidden_size": HIDDEN},
    "media_placeholder_token_id": 3,
    "torch_dtype": "bfloat16",
}
PICTURES = {  # vLLM asks for an image processor even where there are none; one of transformers' stands for Kimi's own
    "image_processor_type": "CLIPImageProcessor",
    "media_tokens_calculator": None,  # a method of Kimi's, which counts an image's tokens
}
TEXT_ONLY = {  # options of an engine: the encoder is left out
    "language_model_only": True,
    "quantization": "ascend",  # without, vLLM misses weights that vllm-ascend makes itself; all may be floats
    "distributed_executor_backend": "mp",  # in one process, vLLM and its worker would share a block size
}
# In vLLM's default layout, blocks of latent attention overlap with states of other blocks' in vllm-ascend 0.30.0rc2.
ENVIRONMENT = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}
MODEL = "language_model.model."
FLOAT32 = ("A_log", "dt_bias", "conv1d", "correction_bias")


def make_kimi_k3(directory: Path) -> Path:
    """Write config, tokenizer and weights; return *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (directory / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    generator = torch.Generator().manual_seed(0)
    weights = {name: draw(name, shape, generator) for name, shape in list_weights().items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    description = {"model_quant_type": "FLOAT", **dict.fromkeys(weights, "FLOAT")}
    (directory / "quant_model_description.json").write_text(json.dumps(description))
    return directory


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a weight: of norms around one, of others so that results are as large as what they are computed from."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        noise /= math.sqrt(shape[-1])
    else:
        noise = 1 + 0.1 * noise if "norm" in name else 0.5 * noise
    return noise if any(part in name for part in FLOAT32) else noise.bfloat16()


def list_weights() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, [out, in] or [size], by the names of the published checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{MODEL}embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{MODEL}norm.weight": (HIDDEN,),
        f"{MODEL}output_attn_res_norm.weight": (HIDDEN,),
        f"{MODEL}output_attn_res_proj.weight": (1, HIDDEN),
        "language_model.lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for index, is_linear in enumerate(LINEAR):
        attention = list_linear_attention() if is_linear else list_latent_attention()
        layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
        layer |= list_experts() if index else list_mlp("mlp", HIDDEN)
        layer |= {f"{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        for part in ("self_attention", "mlp"):
            layer |= {f"{part}_res_norm.weight": (HIDDEN,), f"{part}_res_proj.weight": (1, HIDDEN)}
        shapes |= {f"{MODEL}layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def list_linear_attention() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a KDA module's weights."""
    width = LINEAR_HEADS * LINEAR_SIZE
    return {
        **{f"{part}_proj.weight": (width, HIDDEN) for part in "qkvg"},
        **{f"{part}_conv1d.weight": (width, 1, TAPS) for part in "qkv"},
        "f_a_proj.weight": (LINEAR_SIZE, HIDDEN),
        "f_b_proj.weight": (width, LINEAR_SIZE),
        "b_proj.weight": (LINEAR_HEADS, HIDDEN),
        "A_log": (LINEAR_HEADS,),
        "dt_bias": (width,),
        "o_norm.weight": (LINEAR_SIZE,),
        "o_proj.weight": (HIDDEN, width),
    }


def list_latent_attention() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of latent attention."""
    return {
        "q_a_proj.weight": (QUERY_RANK, HIDDEN),
        "q_a_layernorm.weight": (QUERY_RANK,),
        "q_b_proj.weight": (HEADS * (SIZE + UNCACHED), QUERY_RANK),
        "kv_a_proj_with_mqa.weight": (RANK + UNCACHED, HIDDEN),
        "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * 2 * SIZE, RANK),
        "g_proj.weight": (HEADS * SIZE, HIDDEN),
        "o_proj.weight": (HIDDEN, HEADS * SIZE),
    }


def list_experts() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a mixture of experts, which read and write latent tokens."""
    moe = "block_sparse_moe"
    shapes: dict[str, tuple[int, ...]] = {
        f"{moe}.gate.weight": (EXPERTS, HIDDEN),
        f"{moe}.gate.e_score_correction_bias": (EXPERTS,),
        f"{moe}.routed_expert_down_proj.weight": (LATENT, HIDDEN),
        f"{moe}.routed_expert_norm.weight": (LATENT,),
        f"{moe}.routed_expert_up_proj.weight": (HIDDEN, LATENT),
        **list_mlp(f"{moe}.shared_experts", HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes |= list_mlp(f"{moe}.experts.{expert}", LATENT, ("w1", "w3", "w2"))
    return shapes


def list_mlp(
    name: str, hidden: int, parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MLP's weights, by the names of its *parts*."""
    gate, up, down = (f"{name}.{part}.weight" for part in parts)
    return {gate: (INNER, hidden), up: (INNER, hidden), down: (hidden, INNER)}
