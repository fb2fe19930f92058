"""The models that the kit serves: small ones with real random weights to compare, larger ones without to measure.

vLLM's own dummy weights are so small that results do not depend on attention: they serve for times only.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..machine import ROOT

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Sizes(NamedTuple):
    """Of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    words: int


SMALL = {
    "cuda": Sizes(hidden=1024, inner=2816, layers=4, heads=16, kv_heads=4, words=4096),
    "cpu": Sizes(hidden=128, inner=256, layers=2, heads=4, kv_heads=2, words=320),
}
WIDE = {
    "cuda": Sizes(hidden=4096, inner=14336, layers=8, heads=32, kv_heads=8, words=32000),
    "cpu": Sizes(hidden=256, inner=512, layers=2, heads=4, kv_heads=2, words=320),
}
DEEP = {
    "cuda": Sizes(hidden=2048, inner=5632, layers=61, heads=16, kv_heads=4, words=32000),
    "cpu": Sizes(hidden=128, inner=128, layers=6, heads=4, kv_heads=2, words=320),
}
LATENT = {"cuda": {"hidden": 1024, "layers": 4, "heads": 16}, "cpu": {"hidden": 64, "layers": 2, "heads": 2}}
ALL = {"num_experts_per_tok": "n_routed_experts", "topk_group": "n_group"}
"""What each token takes all of."""


def get_checkpoint(name: str, device: str) -> Path:
    """Return the folder of a model, which is made unless it is there."""
    folder = Path(os.environ.get("KIT_WORK", tempfile.gettempdir())) / "models" / f"{name}-{device}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        MAKERS[name](scratch, device)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # another engine may have made it meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def make_latent(folder: Path, device: str) -> None:
    """Make a DeepSeek-V3 of the head sizes that FlashAttention takes.

    Each token takes all experts: where some are chosen, rounding chooses others, and no difference says anything.
    """
    sys.path[:0] = [str(ROOT / "examples")]
    importlib.import_module("random_deepseek").make_checkpoint(folder, **LATENT[device])
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **{chosen: config[of] for chosen, of in ALL.items()}}, indent=2))


def make_dense(sizes: dict[str, Sizes], has_weights: bool, folder: Path, device: str) -> None:
    """Make a Llama of the sizes for a device."""
    size = sizes[device]
    config = {
        **BASE,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "vocab_size": size.words,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if has_weights:
        from safetensors.torch import save_file

        weights = {name: tensor.to(torch.bfloat16) for name, tensor in make_weights(size)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_weights(size: Sizes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a Llama, scaled to keep activations alive through all layers."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain / columns**0.5)

    def norm(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator).mul_(0.1).add_(1)

    hidden, inner, words, head = size.hidden, size.inner, size.words, size.hidden // size.heads
    heads, kv_heads = size.heads * head, size.kv_heads * head
    yield "model.embed_tokens.weight", torch.randn(words, hidden, generator=generator)
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", matrix(words, hidden, 2.0)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
        for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}.self_attn.{part}_proj.weight", matrix(rows, hidden, 1.5)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, heads, 3.0)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, inner, 2.0)


MAKERS: dict[str, Callable[[Path, str], None]] = {
    "deepseek": make_latent,
    "llama": partial(make_dense, SMALL, True),
    "wide": partial(make_dense, WIDE, False),
    "deep": partial(make_dense, DEEP, False),
}
"""By the name of a model."""
