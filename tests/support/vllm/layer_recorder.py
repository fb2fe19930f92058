"""A KV connector that keeps what it is told of each layer, and a worker extension that tells it.

The extension also keeps when a layer attends, and to how many tokens: so tests see a connector's calls between those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.forward_context import get_forward_context

from dbo_runtime.vllm_plugin.extension import WorkerExtension
from tests.support.vllm.layer_events import ATTEND, SAVE, WAIT, Event


class LayerRecorder(KVConnectorBase_V1, SupportsHMA):
    """Transfers nothing, and keeps the events of each step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.steps: list[list[Event]] = []

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step, whose forward context is the current one."""
        super().bind_connector_metadata(connector_metadata)
        self._step = get_forward_context()
        if self._step.attn_metadata:
            self.steps.append([])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Keep the call."""
        self.steps[-1].append(Event(WAIT, layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Keep the call, and what could be saved now."""
        slots = self._step.slot_mapping[layer_name]
        rows = kv_layer.reshape(-1, kv_layer.shape[-1])[slots]
        whole = attn_metadata is self._step.attn_metadata[layer_name]
        saved = tuple(rows.sum(-1).tolist())
        self.steps[-1].append(Event(SAVE, layer_name, attn_metadata.num_actual_tokens, saved, whole))

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return metadata without content."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Let all blocks be freed."""
        return False, None


class Extension(WorkerExtension):
    """Gives a test the events of the recorder in this worker."""

    def watch_attention(self) -> None:
        """Keep when layers attend from now on."""
        for name, layer in self.model_runner.compilation_config.static_forward_context.items():
            if hasattr(layer, "forward_impl"):
                layer.forward_impl = partial(_attend, name, layer.forward_impl)

    def fail_in(self, layer: str, call: int) -> None:
        """Let a layer's attention fail once, at its *call*-th call from now on (from 1 on)."""
        module = self.model_runner.compilation_config.static_forward_context[layer]
        module.forward_impl = partial(_fail, module, module.forward_impl, [call])

    def take_steps(self) -> list[list[Event]]:
        """Return the events of the steps since the last call."""
        recorder = kv_transfer_state._KV_CONNECTOR_AGENT
        assert isinstance(recorder, LayerRecorder), "the stand-in of a split step is still in place"
        steps, recorder.steps = recorder.steps, []
        return steps


def _attend(layer: str, attend: Callable[..., Any], queries: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    if agent is not None and agent.has_connector_metadata():
        agent.steps[-1].append(Event(ATTEND, layer, queries.shape[0]))
    return attend(queries, *args, **kwargs)


def _fail(module: Any, attend: Callable[..., Any], left: list[int], *args: Any, **kwargs: Any) -> Any:
    left[0] -= 1
    if left[0] == 0:
        module.forward_impl = attend
        raise RuntimeError("no such kernel")
    return attend(*args, **kwargs)
