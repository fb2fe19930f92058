"""Known KV connectors, and what their layer hooks do: plain data that needs neither vLLM nor torch.

In each attention layer vLLM calls two hooks of the connector: `wait_for_layer_load` before and `save_kv_layer` after
attention (`maybe_transfer_kv_layer`). Names are those that connectors are registered under. Every hook was read in vLLM
0.30.0 and vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from dbo_runtime.decline import Decline

IDLE_HOOKS: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "NixlConnector": "the decode node reads blocks after the step",
        "NixlPullConnector": "the decode node reads blocks after the step",
        "NixlPushConnector": "blocks are sent after the step",
        "MooncakeConnector": "blocks are sent after the step",
        "MooncakeStoreConnector": "blocks are stored in `wait_for_save`",
        "OffloadingConnector": "blocks are stored in `get_finished`",
        "SimpleCPUOffloadConnector": "blocks are stored in `wait_for_save`",
        "LMCacheMPConnector": "blocks are stored in `wait_for_save`",
        "HF3FSKVConnector": "blocks are stored in `wait_for_save`",
        "DecodeBenchConnector": "blocks are filled in `start_load_kv`, and never stored",
        # vllm-ascend, which also registers its own MultiConnector, OffloadingConnector and SimpleCPUOffloadConnector
        "MooncakeConnectorV1": "the decode node reads blocks after the step",
        "MooncakeConnectorV2": "the decode node reads blocks after the step",
        "MooncakePullConnector": "the decode node reads blocks after the step",
        "MooncakeD2RHConnectorV1": "the decode node reads blocks after the step",
        "MooncakeHybridConnector": "the decode node reads blocks after the step",
        "AscendStoreConnector": "blocks are stored in `wait_for_save`, without `use_layerwise`",
        "MooncakeConnectorStoreV1": "blocks are stored in `wait_for_save`, without `use_layerwise`",
    }
)
"""Connectors whose layer hooks do nothing -> the moment outside the forward when they transfer KV instead."""

WORKING_HOOKS: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "ExampleConnector": "saves a layer's requests at each call",
        "LMCacheConnectorV1": "one turn of a generator a call, and counts layers, with `use_layerwise`",
        "MoRIIOConnector": "waits for a layer's reads; sends a layer at each call",
        "FlexKVConnectorV1": "passed on to FlexKV, which says that it does nothing with them",
        # vllm-ascend
        "MooncakeLayerwiseConnector": "counts layers by its calls",
        "AscendStoreConnector": "counts layers by its calls, with `use_layerwise`",
        "MooncakeConnectorStoreV1": "counts layers by its calls, with `use_layerwise`",
        "PreemptOffloadConnector": "waits for its loads at the first call",
    }
)
"""Connectors whose layer hooks do something -> their effect. They get an unsplit step's calls, in the same order."""

COMPOSITE = "MultiConnector"
"""The connector that forwards everything to those in its `connectors`."""

LAYERWISE = "use_layerwise"
"""The option that makes AscendStoreConnector use its layer hooks."""

EXTRA = "kv_connector_extra_config"
"""The key that holds a connector's own options."""

KNOWN_MODULES = ("vllm.", "vllm_ascend.")
"""Module prefixes of known connectors. A connector with a known name but another module path is not known."""


def check_connectors(transfer: Mapping[str, Any], declared: Collection[str] = ()) -> Decline | None:
    """Return why steps are not cut into micro-batches with these connectors, or None.

    In nano-batches, attention calls the hooks as in an unsplit step.

    Args:
        transfer: content of `--kv-transfer-config`.
        declared: names of further connectors declared by the user (`DBO_KV_CONNECTORS`).
    """
    for name, options in list_connectors(transfer):
        if name not in declared and not (_is_ours(options) and (name in IDLE_HOOKS or name in WORKING_HOOKS)):
            remedy = f"if its layer hooks need no more than vLLM's contract, DBO_KV_CONNECTORS={name} declares that"
            return Decline("the KV connector is not known to dbo_runtime", f"{name}; {remedy}", only_micro=True)
    return None


def has_layer_hooks(transfer: Mapping[str, Any]) -> bool:
    """Return whether the layer hooks of one of these connectors do something, as far as known."""
    return any(
        name not in IDLE_HOOKS or not _is_ours(options) or bool((options.get(EXTRA) or {}).get(LAYERWISE))
        for name, options in list_connectors(transfer)
    )


def list_connectors(transfer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each connector's name and options; for a composite connector, those of its children."""
    name = transfer.get("kv_connector")
    if name == COMPOSITE and _is_ours(transfer):
        for child in (transfer.get(EXTRA) or {}).get("connectors", ()):
            yield from list_connectors(child)
    elif name:
        yield name, transfer


def _is_ours(options: Mapping[str, Any]) -> bool:
    return (options.get("kv_connector_module_path") or "vllm.").startswith(KNOWN_MODULES)
