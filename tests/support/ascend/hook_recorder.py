"""A KV connector that keeps what vllm-ascend's attention tells it: also that the cache of a layer is written."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.vllm.layer_events import SAVE, WRITTEN, Event
from tests.support.vllm.layer_recorder import LayerRecorder


class HookRecorder(LayerRecorder):
    """Like the one that it extends, with caches of several tensors, and metadata of all layers at once."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the caches of all layers."""
        self._caches = kv_caches

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """Keep the call, and what the cache has of the step by now; startup runs call this, too."""
        if self.has_connector_metadata():
            self.steps[-1].append(Event(WRITTEN, layer_name, saved=self._read(layer_name)))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Keep the call, and what could be saved now."""
        whole = attn_metadata is self._step.attn_metadata
        tokens = attn_metadata[layer_name].num_actual_tokens
        self.steps[-1].append(Event(SAVE, layer_name, tokens, self._read(layer_name), whole))

    def _read(self, layer: str) -> tuple[float, ...]:
        slots = self._step.attn_metadata[layer].slot_mapping
        rows = [cache.reshape(-1, cache.shape[-1])[slots] for cache in self._caches[layer]]
        sums: list[float] = torch.cat([row.float() for row in rows], dim=-1).sum(-1).tolist()
        return tuple(sums)
