"""A tiny config of an architecture, or of a model that is too large to run for a draft."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.outside_files import parse_json, read_text, suggest_folder

LAYERS = 4
LARGE = 512  # hidden size from which a config is shrunk
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_DIM = "head_dim"
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
LATENT = ("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
NAMES: Mapping[int, tuple[str, ...]] = {
    128: ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    LAYERS: (
        *COUNTS,
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
    ),
    2: ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_experts_per_tok", "num_experts_per_token"),
    32: (HEAD_DIM, "attention_head_dim"),
    16: ("rotary_dim",),
    256: ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    320: ("vocab_size",),
    1024: ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "seq_length"),
    512: ("kv_lora_rank",),
    64: ("moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window", *LATENT),
    1: ("eos_token_id", "n_group", "topk_group", "first_k_dense_replace"),
    0: ("pad_token_id", "bos_token_id"),
}
"""Names of sizes in configs, by the size they get. Two divides the numbers of heads and experts."""

TINY = {name: size for size, names in NAMES.items() for name in names}
FACTORS = ("multiplier", "_scale", "scaling", "scale_")
"""Parts of names of factors. Factors of 1 get distinct values, so that a draft can tell them apart."""


def make_config(model: str) -> dict[str, Any]:
    """Return a tiny config of a model, given as an architecture name or as a directory with a `config.json`.

    Raises:
        ConfigError: there is no config.
    """
    file = Path(model) / "config.json"
    if os.path.isfile(file):  # `Path.is_file` raises where a name is too long
        given = parse_json(read_text(file, "config"))
        names = given.get("architectures") if isinstance(given, dict) else None
        if not (isinstance(names, list) and names and isinstance(names[0], str) and names[0].isidentifier()):
            raise ConfigError(f"{file} names no architecture; add `architectures`, as configs of models have it.")
        return shrink(given) if find_hidden_size(given) >= LARGE else given
    if os.path.exists(model) or "/" in model:
        raise ConfigError(describe_missing(model, " or an architecture"))
    content = shrink(get_defaults(model))
    return {**content, "architectures": [model], "tie_word_embeddings": False, "torch_dtype": "float32"}


def describe_missing(model: str, other: str = "") -> str:
    """Return the error of a model without a config; *other* is what else may be named."""
    if os.path.isdir(model):
        return f"folder {model} has no config.json; name the folder of a model{other}."
    close = suggest_folder(model)
    return f"there is no folder {model}; {f'did you mean {close}?' if close else f'name the folder of a model{other}.'}"


def get_defaults(architecture: str) -> dict[str, Any]:
    """Return the defaults of transformers' config class for an architecture.

    Raises:
        ConfigError: transformers has none.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    for kind, names in CLASSES.items():
        if architecture in ((names,) if isinstance(names, str) else names) and kind in CONFIG_MAPPING:
            config = CONFIG_MAPPING[kind]()
            has_heads = hasattr(config, HEAD_DIM) or hasattr(config, "kv_lora_rank")
            heads = {} if has_heads else {HEAD_DIM: TINY[HEAD_DIM]}  # some vLLM models read it
            return {**config.to_dict(), **heads, "model_type": config.model_type}
    raise ConfigError(
        f"transformers has no config class for {architecture}; name a directory with a config.json of such a model, "
        "which may be large: it is made smaller."
    )


def shrink(
    content: Mapping[str, Any], sizes: Mapping[str, int] = TINY, factors: Sequence[str] = FACTORS
) -> dict[str, Any]:
    """Return a config with tiny *sizes*, also in nested configs, and with lists of one entry per layer shortened.

    *factors* are parts of the names of factors that get values other than 1.
    """
    layers = next((content[name] for name in COUNTS if isinstance(content.get(name), int)), 0)
    small: dict[str, Any] = {}
    found = 0
    for name, value in content.items():
        if isinstance(value, dict):
            small[name] = shrink(value, sizes, factors)
        elif isinstance(value, (list, tuple)) and layers > LAYERS and len(value) == layers:
            small[name] = shorten(value)
        elif name in sizes and isinstance(value, (int, float)) and not isinstance(value, bool):
            small[name] = sizes[name]
        elif type(value) is float and value == 1.0 and any(part in name for part in factors):
            found += 1
            small[name] = 1.0 + found / 8
        else:
            small[name] = value
    return small


def shorten(values: Sequence[Any]) -> list[Any]:
    """Return one entry per remaining layer, of all kinds if there are few kinds."""
    kinds = list(dict.fromkeys(values)) if all(isinstance(value, (str, int, float)) for value in values) else []
    if 1 < len(kinds) <= LAYERS // 2:
        return (kinds * LAYERS)[:LAYERS]
    return list(values)[:LAYERS]


def find_hidden_size(content: Mapping[str, Any]) -> int:
    """Return the hidden size of a config, or of a text config inside it; 0 if it has another name."""
    inside = content.get("text_config")
    sizes = [content.get("hidden_size", 0), inside.get("hidden_size", 0) if isinstance(inside, dict) else 0]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def write_config(content: Mapping[str, Any], folder: Path) -> None:
    """Write `config.json` into a folder."""
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
