"""The KV caches of layers: their tensors, and how a step changes them. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


class SavedRows:
    """Rows of caches, and what they held when this was made.

    Args:
        caches: each [blocks, ...].
        rows: the numbers of blocks [rows], on the caches' device.
    """

    def __init__(self, caches: Iterable[torch.Tensor], rows: torch.Tensor) -> None:
        self._rows = rows
        self._held = [(cache, cache[rows]) for cache in caches]

    def restore(self) -> None:
        """Let the rows hold that again."""
        for cache, held in self._held:
            cache[self._rows] = held


def changes_in_place(spec: KVCacheSpec) -> bool:
    """Return whether a step reads what a cache holds and overwrites it: states, and rings of the latest tokens.

    All other caches are written by slot, each token in a place of its own. vLLM does not share the blocks of rings as
    prefixes, which `prefix_cacheable` says since 0.30; versions before have states only.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    own = getattr(spec, "kv_cache_specs", None)  # of each layer, where they differ in size only
    if own is not None:
        return any(map(changes_in_place, own.values()))
    return isinstance(spec, MambaSpec) or not getattr(spec, "prefix_cacheable", True)


def list_caches(layers: Mapping[str, Any], names: Iterable[str]) -> list[torch.Tensor]:
    """Return the tensors of the caches of some layers, by name [blocks, ...]: one a layer, or several."""
    caches: list[torch.Tensor] = []
    for name in names:
        held = layers[name].kv_cache
        caches += [held] if isinstance(held, torch.Tensor) else [*held]
    return caches
