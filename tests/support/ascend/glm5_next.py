"""A tiny GLM-5.3-Flash with random weights. It is served without its encoder.

Its layers have linear attention (KDA) and sparse attention over pools of keys in turn; the first one has a dense MLP.
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

GLM5_NEXT = "Glm5NextForConditionalGeneration"
HIDDEN, INNER, EXPERTS = 128, 64, 4
LAYER_TYPES = ["linear_attention", "deepseek_sparse_attention"] * 2
LINEAR_HEADS, LINEAR_SIZE, TAPS = 4, 128, 4  # vllm-ascend's kernels know no other size
HEADS, SIZE, RANK, QUERY_RANK = 4, 64, 512, 64
INDEX_HEADS, INDEX_SIZE, POOL = 4, 128, 4
STREAMS = 4
MIXES = (2 + STREAMS) * STREAMS
TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": len(LAYER_TYPES),
    "layer_types": LAYER_TYPES,
    "mlp_layer_types": ["dense", *["sparse"] * (len(LAYER_TYPES) - 1)],
    "num_attention_heads": HEADS,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": 0,
    "v_head_dim": SIZE,
    "mla_nope": True,
    "linear_head_dim": LINEAR_SIZE,
    "linear_num_heads": LINEAR_HEADS,
    "linear_conv_kernel_dim": TAPS,
    "linear_lower_bound": -5.0,
    "index_topk": 8 * POOL,  # of up to 512 tokens
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_SIZE,
    "index_kpool": POOL,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 0,
    "mhc": True,
    "mhc_num_residual_streams": STREAMS,
    "rms_norm_eps": 1e-5,
    # No part is rotated. vllm-ascend keeps the tables of the first rotary embedding, here not the encoder's.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "rope_dim": 64},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONFIG = {
    "model_type": "glm5_next",
    "architectures": [GLM5_NEXT],
    "text_config": TEXT,
    "vision_config": {},
    "torch_dtype": "bfloat16",
}
TEXT_ONLY = {  # options of an engine: the encoder is left out
    "language_model_only": True,
    "distributed_executor_backend": "mp",  # in one process, vLLM and its worker would share a block size
}
MODEL = "model.language_model."
LAYERS = f"{MODEL}layers."
FLOAT32 = (".hc_", "A_log", "dt_bias", "conv1d", "_ape", "correction_bias")


def make_glm5_next(directory: Path, drafts: bool = False) -> Path:
    """Write config, tokenizer and weights, with *drafts* those of an MTP layer, too; return *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    config = {**CONFIG, "text_config": {**TEXT, "num_nextn_predict_layers": int(drafts)}}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    weights = {name: draw(name, shape, generator) for name, shape in list_weights().items()}
    # Tokens are large and like themselves, so an answer sometimes repeats one, and drafts are right.
    weights[f"{MODEL}embed_tokens.weight"] *= 8
    weights["lm_head.weight"] += weights[f"{MODEL}embed_tokens.weight"] / 8
    save_file(weights | (make_mtp_layer(weights) if drafts else {}), directory / "model.safetensors", {"format": "pt"})
    return directory


def make_mtp_layer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a layer that drafts: where it joins tokens and hidden states, it leaves out tokens.

    It has the attention and the experts of the last layer, but adds less. So it often drafts what the model has just
    said, which is sometimes right.
    """
    last = f"{LAYERS}{len(LAYER_TYPES) - 1}."
    own = {name.removeprefix(last): w.clone() for name, w in weights.items() if name.startswith(last)}
    layer = {
        name: w / 8 if "o_proj" in name or "down_proj" in name else w for name, w in own.items() if "hc_" not in name
    }
    layer |= {f"{name}.weight": torch.ones(HIDDEN).bfloat16() for name in ("enorm", "hnorm")}
    layer["shared_head.norm.weight"] = weights[f"{MODEL}norm.weight"].clone()
    layer["eh_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1).bfloat16()
    layer["embed_tokens.weight"] = weights[f"{MODEL}embed_tokens.weight"].clone()
    layer["shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return {f"{LAYERS}{len(LAYER_TYPES)}.{name}": weight for name, weight in layer.items()}


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a weight: of norms around one, of others so that results are as large as what they are computed from."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        noise = 0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise
    else:
        noise = noise / math.sqrt(shape[-1]) if len(shape) > 1 else 0.5 * noise
    return noise if any(part in name for part in FLOAT32) else noise.bfloat16()


def list_weights() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, [out, in] or [size], by the names of the published checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{MODEL}embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{MODEL}norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for index, kind in enumerate(LAYER_TYPES):
        attention = list_linear_attention() if kind == "linear_attention" else list_sparse_attention()
        layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
        layer |= list_mlp("mlp") if index == 0 else list_experts()
        layer |= {f"{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        for part in ("attn", "ffn"):
            layer |= {f"hc_{part}_fn": (MIXES, STREAMS * HIDDEN), f"hc_{part}_base": (MIXES,), f"hc_{part}_scale": (3,)}
        shapes |= {f"{LAYERS}{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def list_linear_attention() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a KDA module's weights."""
    width = LINEAR_HEADS * LINEAR_SIZE
    return {
        **{f"{part}_proj.weight": (width, HIDDEN) for part in "qkv"},
        **{f"{part}_conv1d.weight": (width, 1, TAPS) for part in "qkv"},
        **{f"{part}_a_proj.weight": (LINEAR_SIZE, HIDDEN) for part in "fg"},
        **{f"{part}_b_proj.weight": (width, LINEAR_SIZE) for part in "fg"},
        "b_proj.weight": (LINEAR_HEADS, HIDDEN),
        "A_log": (LINEAR_HEADS,),
        "dt_bias": (width,),
        "o_norm.weight": (LINEAR_SIZE,),
        "o_proj.weight": (HIDDEN, width),
    }


def list_sparse_attention() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of latent attention and of its indexer."""
    return {
        "q_a_proj.weight": (QUERY_RANK, HIDDEN),
        "q_a_layernorm.weight": (QUERY_RANK,),
        "q_b_proj.weight": (HEADS * SIZE, QUERY_RANK),
        "kv_a_proj_with_mqa.weight": (RANK, HIDDEN),
        "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * 2 * SIZE, RANK),
        "o_proj.weight": (HIDDEN, HEADS * SIZE),
        "indexer.wq_b.weight": (INDEX_HEADS * INDEX_SIZE, QUERY_RANK),
        "indexer.wk.weight": (INDEX_SIZE, HIDDEN),
        "indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
        "indexer.k_norm.weight": (INDEX_SIZE,),
        "indexer.k_norm.bias": (INDEX_SIZE,),
        "indexer.index_kpool_compress_ape": (POOL, INDEX_SIZE),
        "indexer.index_kpool_compress_gate": (INDEX_SIZE, HIDDEN),
    }


def list_experts() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a mixture of experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.gate.e_score_correction_bias": (EXPERTS,),
        **list_mlp("mlp.shared_experts"),
    }
    for expert in range(EXPERTS):
        shapes |= list_mlp(f"mlp.experts.{expert}")
    return shapes


def list_mlp(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MLP's weights."""
    into = {f"{name}.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
    return {**into, f"{name}.down_proj.weight": (HIDDEN, INNER)}
