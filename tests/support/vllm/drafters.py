"""Drafters for tests: trained ones for the tiny DeepSeek, and others with random weights, whose drafts are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.vllm.engines import TINY

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def draft_by_mtp(drafts: int) -> dict[str, Any]:
    """Return options of an engine in which the trained MTP layer drafts for the tiny DeepSeek."""
    # vLLM builds as many layers as the model says that it has, and that of the tiny DeepSeek has none.
    return {
        "hf_overrides": {"num_nextn_predict_layers": 1},
        **_draft("mtp", TINY.with_name("tiny-deepseek-mtp"), drafts),
    }


def draft_by_eagle3(drafts: int) -> dict[str, Any]:
    """Return options of an engine in which the trained Eagle3 head drafts for the tiny DeepSeek."""
    return _draft("eagle3", TINY.with_name("tiny-deepseek-eagle3"), drafts)


def draft_by_eagle(drafts: int, folder: Path) -> dict[str, Any]:
    """Return options of an engine in which an Eagle head drafts; *folder* is where it is made.

    Its layer is one of the model's own, and what joins tokens and hidden states is random.
    """
    model = load_file(TINY / "model.safetensors")
    weights = {name.replace("model.layers.1.", "layers.0."): w for name, w in model.items() if ".layers.1." in name}
    joined = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) / 16
    norms = {f"{name}.weight": torch.ones(128) for name in ("enorm", "hnorm", "norm")}
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 1}
    write_drafter(folder, config, {**weights, **norms, "fc.weight": joined})
    return _draft("eagle", folder, drafts)


def draft_by_model(drafts: int, folder: Path) -> dict[str, Any]:
    """Return options of an engine in which the dense model in *folder* drafts."""
    return _draft("draft_model", folder, drafts, "CPU_ATTN")


def draft_by_head_of(drafts: int, folder: Path, target: Path, hidden: int | None = None) -> dict[str, Any]:
    """Return options of an engine in which a random Eagle3 head drafts for a Llama in *target*.

    Its hidden size is that of the model, or *hidden*.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    size, wide, inner = hidden or config["hidden_size"], config["hidden_size"], config["intermediate_size"]
    attention = {
        "q": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
        "v": config["num_key_value_heads"],
    }
    shapes = {
        f"midlayer.self_attn.{name}_proj": (heads * config["head_dim"], 2 * size) for name, heads in attention.items()
    }
    shapes |= {
        "midlayer.self_attn.o_proj": (size, attention["q"] * config["head_dim"]),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "fc": (size, 3 * (hidden or wide)),
        "lm_head": (config["vocab_size"], size),
        "embed_tokens": (config["vocab_size"], size),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(size) for name in norms}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": size}
    own |= {"draft_vocab_size": config["vocab_size"], "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    write_drafter(folder, {**config, **own}, weights)
    return _draft("eagle3", folder, drafts, "CPU_ATTN")


def write_drafter(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write a model that vLLM loads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _draft(method: str, folder: Path, drafts: int, backend: str = "CPU_MLA") -> dict[str, Any]:
    """Return the option; vLLM chooses the drafter's backend by itself otherwise, and on some CPUs one without fp32."""
    speculative = {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": drafts,
        "attention_backend": backend,
    }
    return {"speculative_config": speculative}
