"""The KV caches of layers: their tensors, and how a step changes them. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


class SavedRows:
    """Rows of caches, with a copy of their contents.

    Args:
        caches: each [blocks, ...].
        rows: indices of blocks [rows], on the caches' device.
    """

    def __init__(self, caches: Iterable[torch.Tensor], rows: torch.Tensor) -> None:
        self._rows = rows
        self._held = [(cache, cache[rows]) for cache in caches]

    def restore(self) -> None:
        """Write the saved contents back."""
        for cache, held in self._held:
            cache[self._rows] = held


def changes_in_place(spec: KVCacheSpec) -> bool:
    """Return whether a step reads a cache's contents and overwrites them: states, and rings of the latest tokens.

    All other caches are written by slot, with a separate place per token. vLLM does not share blocks of rings as
    prefixes. Since 0.30 `prefix_cacheable` says so; earlier versions have only states.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    own = getattr(spec, "kv_cache_specs", None)  # one per layer, if they differ only in size
    if own is not None:
        return any(map(changes_in_place, own.values()))
    return isinstance(spec, MambaSpec) or not getattr(spec, "prefix_cacheable", True)


def list_caches(layers: Mapping[str, Any], names: Iterable[str]) -> list[torch.Tensor]:
    """Return the cache tensors of some layers [blocks, ...]; a layer may have several."""
    caches: list[torch.Tensor] = []
    for name in names:
        held = layers[name].kv_cache
        caches += [held] if isinstance(held, torch.Tensor) else [*held]
    return caches
