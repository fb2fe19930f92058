"""A worker extension that lets the adapter of dense models decline every stage but the first.

It is in force where it is imported, which vLLM does in the workers that it is named for.
"""

from __future__ import annotations

from typing import Any

from dbo_models.dense import DenseAdapter
from dbo_runtime.vllm_plugin.extension import WorkerExtension


class Extension(WorkerExtension):
    """Like the one that it extends."""


def decline_later_stages(self: DenseAdapter, model: Any) -> str | None:
    return "on a whim" if model.model.start_layer else None


DenseAdapter.decline = decline_later_stages  # type: ignore[method-assign]
