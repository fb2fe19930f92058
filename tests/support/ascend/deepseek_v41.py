"""A tiny DeepSeek V4.1 with random weights. It is served without its encoder.

Layers share keys: of no, two or one token each, which the second and the fourth layer make. One layer chooses among
blocks of keys for the one after it. The second and the fifth layer have an engram.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.ascend import deepseek_v4
from tests.support.ascend.deepseek_v4 import EXPERTS, HIDDEN, INDEX_HEADS, INDEX_SIZE, SIZE, STREAMS
from tests.support.ascend.modelslim import DYNAMIC, quantize_model
from tests.support.vllm.families import TINY, VOCABULARY

RATIOS = [0, 2, 2, 1, 1, 1]  # tokens a key that layers share, by layer
KEY_LAYERS, INDEX_LAYERS, CANDIDATE_LAYER = [1, 3], [1, 3, 4], 3
ENGRAM_LAYERS = [1, 4]
LENGTH, LOOKUP_HEADS, LOOKUP_SIZE, BUCKETS = 3, 4, 32, 20  # of an engram; each of four ranks has two heads
ROWS = 640  # of its table; its heads have as many as prime numbers from 23 on
TEXT: dict[str, Any] = {
    **{name: value for name, value in deepseek_v4.CONFIG.items() if name not in ("model_type", "architectures")},
    "model_type": "deepseek_v41_text",
    "num_hidden_layers": len(RATIOS),
    "compress_ratios": RATIOS,
    "kv_source_layer_ids": KEY_LAYERS,
    "index_source_layer_ids": INDEX_LAYERS,
    "candidate_source_layer_id": CANDIDATE_LAYER,
    "candidate_topk_blocks": 4,  # of up to 64
    "candidate_block_size": 8,
    "index_topk": 8,
    "num_hash_layers": 0,
    "engram_layer_ids": ENGRAM_LAYERS,
    "engram_num_embeddings": [ROWS] * len(ENGRAM_LAYERS),
    "engram_max_ngram_size": LENGTH,
    "engram_n_heads": LOOKUP_HEADS,
    "engram_head_dim": LOOKUP_SIZE,
    "engram_vocab_size": BUCKETS,
    "engram_pad_token_id": 2,
    "image_token_id": 129264,  # no token of the tiny vocabulary
}
CONFIG = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "text_config": TEXT,
    "vision_config": {},
    "torch_dtype": "bfloat16",
}
SERVED: dict[str, Any] = {  # options of an engine: without its encoder, and with its tables on the NPU
    "language_model_only": True,
    "distributed_executor_backend": "mp",  # in one process, vLLM and its worker would share a block size
    "engram_config": {"cpu_offload": False},
}


def make_deepseek_v41(directory: Path) -> Path:
    """Write config, tokenizer and weights; return *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    text = {**TEXT, "engram_compressed_vocab_size": count_normal_tokens(directory)}
    (directory / "config.json").write_text(json.dumps({**CONFIG, "text_config": text}, indent=2))
    weights = make_weights()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    write_index(directory)
    return directory


def write_index(directory: Path) -> None:
    """Say which file has which weights: only so are tables of an engram found."""
    (file,) = directory.glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), file.name)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def quantize_deepseek_v41(source: Path, directory: Path) -> Path:
    """Write the model with projections and experts in int8, as ModelSlim does; return *directory*."""
    quantize_model(make_deepseek_v41(source), directory, DYNAMIC, DYNAMIC)
    write_index(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write the tiny tokenizer, with as many tokens as the model has: hashes are of those that it knows."""
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    first = max([*known.values(), *(token["id"] for token in tokenizer["added_tokens"])]) + 1
    known |= {f"token{number}": number for number in range(first, VOCABULARY)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def count_normal_tokens(directory: Path) -> int:
    """Return how many tokens are left where those are one that look alike, which hashes take for one."""
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    _, count = build_compressed_token_map(AutoTokenizer.from_pretrained(directory))
    return int(count)


def make_weights() -> dict[str, torch.Tensor]:
    """Return weights that keep activations alive, by the names of the published checkpoint."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "norm.weight": (HIDDEN,),
        "head.weight": (VOCABULARY, HIDDEN),
    }
    for index in range(len(RATIOS)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in list_layer(index).items()}
    weights = {name: deepseek_v4.draw(name, shape, generator) for name, shape in shapes.items()}
    for index in range(len(RATIOS)):
        weights[f"layers.{index}.ffn.gate.bias"] = 0.1 * torch.randn(EXPERTS, generator=generator)
    for index in ENGRAM_LAYERS:
        for part in "qk":
            weights[f"layers.{index}.engram.{part}_weight"] = torch.randn(
                STREAMS, HIDDEN, generator=generator
            ).bfloat16()
        weights[f"layers.{index}.engram.embed.weight"] *= LOOKUP_SIZE**0.5
    return weights


def list_layer(index: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, [out, in] or [size]."""
    shapes = {name: shape for name, shape in deepseek_v4.list_layer(1).items() if not name.startswith("hc_head")}
    if index in KEY_LAYERS:
        parts = ("wkv", "wgate") if RATIOS[index] == 2 else ("wkv",)
        shapes |= {f"attn.compressor.{part}.weight": (SIZE, HIDDEN) for part in parts}
        shapes |= {"attn.compressor.norm.weight": (SIZE,), "attn.indexer.k_norm.weight": (INDEX_SIZE,)}
        shapes |= {"attn.indexer.wk.weight": (INDEX_SIZE, SIZE)}
    if index in INDEX_LAYERS:
        shapes |= {
            "attn.indexer.wq_b.weight": (INDEX_HEADS * INDEX_SIZE, deepseek_v4.QUERY_RANK),
            "attn.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
        }
    if index in ENGRAM_LAYERS:
        columns = (LENGTH - 1) * LOOKUP_HEADS
        shapes |= {
            "engram.wkv.weight": ((STREAMS + 1) * HIDDEN, columns * LOOKUP_SIZE),
            "engram.embed.weight": (ROWS, LOOKUP_SIZE),
        }
    return shapes
