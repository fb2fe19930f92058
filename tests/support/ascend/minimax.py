"""A tiny MiniMax-M3 with random weights: a dense layer, then layers with sparse attention and experts.

It is served without its encoder.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.ascend.drafts import leave_backend
from tests.support.vllm.drafters import draft_by_head_of
from tests.support.vllm.families import LAYERS, MINIMAX_M3, TINY, VOCABULARY

HIDDEN, INNER, DENSE = 128, 64, 256
HEADS, KEY_HEADS, SIZE = 4, 2, 128  # vllm-ascend's kernels know no other size
EXPERTS = 4
SPARSE_LAYERS = [0, *[1] * (LAYERS - 1)]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "dense_intermediate_size": DENSE,
    "shared_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "num_mtp_modules": 0,
    "moe_layer_freq": SPARSE_LAYERS,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": SIZE,
        "sparse_num_index_heads": KEY_HEADS,
        "sparse_topk_blocks": 2,  # of up to four, of which the nearest one always is
        "sparse_block_size": 128,
        "sparse_disable_index_value": SPARSE_LAYERS,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": SPARSE_LAYERS,
    },
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_channels": 3,
    "patch_size": 14,
    "layer_norm_eps": 1e-5,
    "img_token_compression_config": {
        "image_token_compression_method": "patch_merge",
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
CONFIG = {
    "model_type": "minimax_m3_vl",
    "architectures": [MINIMAX_M3],
    "text_config": TEXT,
    "vision_config": VISION,
    "projector_hidden_size": 64,
    "image_token_index": 3,
    "video_token_index": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
VISION_PROJECTIONS = (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "fc1", "fc2")
PROJECTORS = ("vision_tower.multi_modal_projector", "vision_tower.patch_merge_mlp")
TEXT_ONLY = {  # options of an engine: the encoder is left out
    "language_model_only": True,
    # vllm-ascend's module of the model leaves another in place of one of vLLM's, which its workers must have imported.
    "distributed_executor_backend": "mp",
}


def describe_vision_tower(model: Path) -> None:
    """Say of projections of the vision tower, of which the tiny model has no weights, that they are not quantized."""
    file = model / "quant_model_description.json"
    names = [f"encoder.layers.0.{name}" for name in VISION_PROJECTIONS]
    description = {f"model.vision_tower.vision_model.{name}.weight": "FLOAT" for name in names}
    description |= {f"model.{name}.linear_{i}.weight": "FLOAT" for name in PROJECTORS for i in (1, 2)}
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **description}), encoding="utf-8")


def make_minimax(directory: Path, indexer_seed: int | None = None) -> Path:
    """Write config and tokenizer, and weights of the language model alone; return *directory*.

    Those of indexers are others with an *indexer_seed*.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    weights = make_weights(0)
    if indexer_seed is not None:
        others = make_weights(indexer_seed)
        weights |= {name: others[name] for name in weights if ".index_" in name}
    weights = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return weights that keep activations alive; those of norms are offsets from one."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    for index, is_sparse in enumerate(SPARSE_LAYERS):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in list_layer(bool(is_sparse)).items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[f"{name}.weight"] = noise / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise
    for index, is_sparse in enumerate(SPARSE_LAYERS):
        if is_sparse:
            bias = 0.1 * torch.randn(EXPERTS, generator=generator)
            weights[f"model.layers.{index}.block_sparse_moe.e_score_correction_bias"] = bias
    return weights


def list_layer(is_sparse: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, [out, in] or [size]."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
        "self_attn.k_proj": (KEY_HEADS * SIZE, HIDDEN),
        "self_attn.v_proj": (KEY_HEADS * SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "self_attn.q_norm": (SIZE,),
        "self_attn.k_norm": (SIZE,),
    }
    if not is_sparse:
        return shapes | list_mlp("mlp", DENSE, "gate_proj", "up_proj", "down_proj")
    shapes |= {
        "self_attn.index_q_proj": (KEY_HEADS * SIZE, HIDDEN),
        "self_attn.index_k_proj": (SIZE, HIDDEN),
        "self_attn.index_q_norm": (SIZE,),
        "self_attn.index_k_norm": (SIZE,),
        "block_sparse_moe.gate": (EXPERTS, HIDDEN),
        **list_mlp("block_sparse_moe.shared_experts", INNER, "gate_proj", "up_proj", "down_proj"),
    }
    for expert in range(EXPERTS):
        shapes |= list_mlp(f"block_sparse_moe.experts.{expert}", INNER, "w1", "w3", "w2")
    return shapes


def list_mlp(name: str, inner: int, gate: str, up: str, down: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MLP's weights."""
    return {f"{name}.{gate}": (inner, HIDDEN), f"{name}.{up}": (inner, HIDDEN), f"{name}.{down}": (HIDDEN, inner)}


def draft_by_eagle3(drafts: int, folder: Path) -> dict[str, Any]:
    """Return options of an engine in which a random Eagle3 head drafts; *folder* is where it is made."""
    target = folder / "target"
    target.mkdir(parents=True)
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: TEXT[name] for name in (*names, "max_position_embeddings")}
    config = {"model_type": "llama", "intermediate_size": DENSE, **sizes}
    (target / "config.json").write_text(json.dumps(config))
    return leave_backend(draft_by_head_of(drafts, folder, target))
