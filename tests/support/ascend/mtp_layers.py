"""MTP layers for models with random weights: the layer that drafts is a copy of one of the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MTP: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 2}}


def add_mtp_layer(folder: Path) -> Path:
    """Add a layer that drafts to the model in *folder*: where it joins tokens and hidden states, it leaves out tokens.

    So it often drafts what the model's last layer has just said, which is sometimes right.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    last, size = config["num_hidden_layers"] - 1, config["hidden_size"]
    weights = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{last + 1}."
    for own in ("model.layers.0.self_attn.indexer.", f"model.layers.{last}."):  # the last one may have no indexer
        copies = {name: weight.clone() for name, weight in weights.items() if name.startswith(own)}
        weights |= {prefix + name.split(".", 3)[3]: weight for name, weight in copies.items()}
    weights |= {f"{prefix}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{prefix}eh_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}), encoding="utf-8")
    return folder


def add_qwen_mtp_layer(folder: Path) -> dict[str, Any]:
    """Give a Qwen3.5 in *folder* an MTP layer: its own second layer, fed with hidden states and a little of the tokens.

    Returns:
        Options of an engine in which it drafts two tokens.
    """
    weights = load_file(folder / "model.safetensors")
    embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
    layer = embedding.replace("embed_tokens.weight", "layers.1.")
    own = {name.replace(layer, "mtp.layers.0."): w.clone() for name, w in weights.items() if name.startswith(layer)}
    size = weights[embedding].shape[1]
    own["mtp.fc.weight"] = torch.cat([torch.eye(size) / 10, torch.eye(size)], 1)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    own |= {f"mtp.{name}.weight": torch.zeros(size) for name in norms}  # offsets from one
    save_file({**weights, **own}, folder / "model.safetensors")
    return {"speculative_config": {"method": "qwen3_5_mtp", "num_speculative_tokens": 2}}
