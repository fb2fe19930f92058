"""Models with quantized caches, and which types the caches of an engine have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.ascend.modelslim import DYNAMIC, quantize_indexers, quantize_model
from tests.support.ascend.mtp_layers import add_mtp_layer
from tests.support.ascend.sparse_attention import GLM
from tests.support.vllm.engine import Engine
from tests.support.vllm.families import make_family

INDEXERS: dict[str, Any] = {"attention_config": {"indexer_kv_dtype": "int8"}}
LATENTS: dict[str, Any] = {"kv_cache_dtype": "int8"}
BOTH = {**INDEXERS, **LATENTS}
PRODUCER = {  # of a prefill node, where vllm-ascend stores an indexer's keys run by run
    "kv_transfer_config": {
        "kv_connector": "HookRecorder",
        "kv_connector_module_path": "tests.support.ascend.hook_recorder",
        "kv_role": "kv_producer",
    },
    "worker_extension_cls": "tests.support.vllm.layer_recorder.Extension",
}


def make_model(
    folder: Path, name: str = GLM, attention: str = DYNAMIC, experts: str = DYNAMIC, drafts: bool = False, **sizes: Any
) -> Path:
    """Write a model whose weights are quantized so, and whose description says that its indexers are, too."""
    source = make_family(name, folder / "source", **sizes)
    if drafts:
        add_mtp_layer(source)
    return quantize_indexers(quantize_model(source, folder / "model", attention, experts))


def find_types(engine: Engine, rank: int) -> list[tuple[set[str], set[str]]]:
    """Return the types of the caches of indexers, and of those of attention, on each worker."""
    found: list[tuple[set[str], set[str]]] = engine.llm.collective_rpc(_find_types)
    return found


def _find_types(worker: Any) -> tuple[set[str], set[str]]:
    layers = worker.vllm_config.compilation_config.static_forward_context
    types: tuple[set[str], set[str]] = (set(), set())
    for name, layer in layers.items():
        if len(getattr(layer, "kv_cache", ())):
            types["indexer" not in name].add(str(layer.kv_cache[0].dtype).removeprefix("torch."))
    return types
