"""A tiny DeepSeek V4 with random weights: layers without compressed keys, and with those of 4 and of 128 tokens.

The first layer chooses experts by the token itself. Weights have the names of the published checkpoint.
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

HIDDEN, INNER, EXPERTS, TOP = 128, 64, 4, 2
HEADS, SIZE, ROTARY = 4, 512, 64  # vllm-ascend pads pages of caches for no other size
QUERY_RANK, OUT_RANK, GROUPS = 64, 32, 2
INDEX_HEADS, INDEX_SIZE = 4, 128
STREAMS = 4
RATIOS = [1, 4, 128, 4]  # tokens a compressed key, by layer
HASHED = 1  # layers that choose experts by the token
MIXES = (2 + STREAMS) * STREAMS
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": SIZE,
    "qk_rope_head_dim": ROTARY,
    "q_lora_rank": QUERY_RANK,
    "o_lora_rank": OUT_RANK,
    "o_groups": GROUPS,
    "sliding_window": 128,
    "compress_ratios": RATIOS,
    "compress_rope_theta": 160000.0,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_SIZE,
    "index_topk": 8,  # of up to 128 compressed keys
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": TOP,
    "num_hash_layers": HASHED,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


VISION = {"vision_n_layers": 1}  # of an encoder, which tests leave out
TEXT_ONLY = {"language_model_only": True}


def make_deepseek_v4(directory: Path, seed: int = 0, drafts: bool = False, sees_images: bool = False) -> Path:
    """Write config, tokenizer and weights, with *drafts* those of an MTP layer, too; return *directory*.

    A model that *sees_images* has other experts for their tokens, but no weights of an encoder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    config = {**CONFIG, "num_nextn_predict_layers": int(drafts), **(VISION if sees_images else {})}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    weights = make_weights(seed)
    if sees_images:
        generator = torch.Generator().manual_seed(seed)
        gates = {f"layers.{index}.ffn.gate.bias_vl": torch.randn(EXPERTS, generator=generator) for index in range(4)}
        weights |= gates
    save_file(weights | (make_mtp_layer(weights) if drafts else {}), directory / "model.safetensors", {"format": "pt"})
    return directory


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return weights that keep activations alive."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "norm.weight": (HIDDEN,),
        "head.weight": (VOCABULARY, HIDDEN),
        **list_head(),
    }
    for index, ratio in enumerate(RATIOS):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in list_layer(ratio).items()}
    weights = {name: draw(name, shape, generator) for name, shape in shapes.items()}
    for index in range(HASHED):  # an expert and the next one, for each token another
        first = torch.randint(EXPERTS, (VOCABULARY, 1), generator=generator)
        table = (first + torch.arange(TOP)) % EXPERTS
        weights[f"layers.{index}.ffn.gate.tid2eid"] = table.int()
    for index in range(HASHED, len(RATIOS)):
        weights[f"layers.{index}.ffn.gate.bias"] = 0.1 * torch.randn(EXPERTS, generator=generator)
    return weights


def make_mtp_layer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a layer that drafts: where it joins tokens and streams, it leaves out tokens.

    It attends as the first layer and has the experts of the last, both of which add little. So it often drafts what the
    model has just said, which is sometimes right.
    """
    last = len(RATIOS) - 1
    copied = {f"layers.0.{part}": part for part in ("attn.", "attn_norm.", "hc_attn_")}
    copied |= {f"layers.{last}.{part}": part for part in ("ffn.", "ffn_norm.", "hc_ffn_")}
    found = {"e_proj.weight": torch.zeros(HIDDEN, HIDDEN), "h_proj.weight": torch.eye(HIDDEN)}
    found |= {f"{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm")}
    for prefix, part in copied.items():
        own = {name: weight for name, weight in weights.items() if name.startswith(prefix)}
        found |= {part + name.removeprefix(prefix): weight.clone() for name, weight in own.items()}
    for name in ("attn.wo_b.weight", *(name for name in found if name.endswith("w2.weight"))):
        found[name] = found[name] / 8
    shared = {"norm.weight": "norm.weight", "head.weight": "head.weight", "emb.tok_emb.weight": "embed.weight"}
    shared |= {name: name for name in list_head()}
    found |= {own: weights[name].clone() for own, name in shared.items()}
    return {f"mtp.0.{name}": weight.contiguous() for name, weight in found.items()}


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a weight: of norms around one, of others so that results are as large as what they are computed from."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return (1 + 0.1 * noise).bfloat16()
    if ".hc_" in name or name.startswith("hc_") or "sink" in name or "ape" in name:  # in float32
        return noise / math.sqrt(shape[-1]) if name.endswith("_fn") else 0.5 * noise
    return (noise / math.sqrt(shape[-1])).bfloat16()


def list_head() -> dict[str, tuple[int, ...]]:
    """Return the shapes of what mixes the streams in the end."""
    return {
        "hc_head_fn": (STREAMS, STREAMS * HIDDEN),
        "hc_head_base": (STREAMS,),
        "hc_head_scale": (1,),
    }


def list_layer(ratio: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, [out, in] or [size]."""
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn.attn_sink": (HEADS,),
        "attn.wq_a.weight": (QUERY_RANK, HIDDEN),
        "attn.q_norm.weight": (QUERY_RANK,),
        "attn.wq_b.weight": (HEADS * SIZE, QUERY_RANK),
        "attn.wkv.weight": (SIZE, HIDDEN),
        "attn.kv_norm.weight": (SIZE,),
        "attn.wo_a.weight": (GROUPS * OUT_RANK, HEADS * SIZE // GROUPS),
        "attn.wo_b.weight": (HIDDEN, GROUPS * OUT_RANK),
        "ffn.gate.weight": (EXPERTS, HIDDEN),
        **list_mlp("ffn.shared_experts"),
    }
    for part in ("attn", "ffn"):
        shapes |= {f"hc_{part}_fn": (MIXES, STREAMS * HIDDEN), f"hc_{part}_base": (MIXES,), f"hc_{part}_scale": (3,)}
    for expert in range(EXPERTS):
        shapes |= list_mlp(f"ffn.experts.{expert}")
    if ratio > 1:
        shapes |= list_compressor("attn.compressor", ratio, SIZE)
    if ratio == 4:
        shapes |= {
            "attn.indexer.wq_b.weight": (INDEX_HEADS * INDEX_SIZE, QUERY_RANK),
            "attn.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
            **list_compressor("attn.indexer.compressor", ratio, INDEX_SIZE),
        }
    return shapes


def list_mlp(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MLP's weights."""
    into = {f"{name}.{part}.weight": (INNER, HIDDEN) for part in ("w1", "w3")}
    return {**into, f"{name}.w2.weight": (HIDDEN, INNER)}


def list_compressor(name: str, ratio: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what compresses keys; those of 4 tokens have channels for the next key, too."""
    width = size * (2 if ratio == 4 else 1)
    return {
        f"{name}.ape": (ratio, width),
        f"{name}.wkv.weight": (width, HIDDEN),
        f"{name}.wgate.weight": (width, HIDDEN),
        f"{name}.norm.weight": (size,),
    }
