"""Models of the kinds that the GPU kit measures, as small as vLLM's CUDA backends take them, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# The sizes of heads of DeepSeek-V3 itself.
HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128}


def make_folder(name: str, folder: Path) -> Path:
    """Write the config of `llama` or `deepseek` into a folder."""
    tiny = json.loads((ROOT / "examples" / "tiny-deepseek" / "config.json").read_text(encoding="utf-8"))
    config = {"llama": LLAMA, "deepseek": {**tiny, **HEADS}}[name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def configure(folder: Path, backend: str | None = None) -> Any:
    """Return vLLM's configuration of a model, with a backend of attention, or the one that vLLM chooses."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2048,
        attention_backend=backend,
    )
    return arguments.create_engine_config()


def make_model(vllm_config: Any) -> Any:
    """Return a model whose weights have shapes only."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config), torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
        return initialize_model(vllm_config)
