"""Engines that share out the keys' computation, and what context parallel steps need, removed by way of trial."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.support.ascend.engines import OPTIONS
from tests.support.ascend.jobs import cut_at_boundaries, generate
from tests.support.vllm.engine import Engine

FLASHCOMM = {} if find_release() == LATEST_ASCEND else {"enable_flashcomm1": True}  # 0.23 wants both
SHARED_OUT: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "additional_config": {**OPTIONS["additional_config"], **FLASHCOMM, "enable_dsa_cp": True},
}
ARRIVE = (0, 0, 0, 1, 2, 2)


def find_attentions(engine: Engine, rank: int) -> set[str]:
    """Return the classes that attend, on all workers."""
    found: list[set[str]] = engine.llm.collective_rpc(_find_attentions)
    return set().union(*found)


def _find_attentions(worker: Any) -> set[str]:
    return {type(impl).__name__ for impl in _list_attentions(worker)}


def _list_attentions(worker: Any) -> list[Any]:
    impls = (getattr(module, "impl", None) for module in worker.model_runner.get_model().modules())
    return [impl for impl in impls if hasattr(impl, "W_UK_T")]


def share_out_tokens(engine: Engine, rank: int) -> bool:
    """Return whether all attention, on all workers, attends from a chunk of the tokens."""
    return all(engine.llm.collective_rpc(_share_out_tokens))


def _share_out_tokens(worker: Any) -> bool:
    impls = _list_attentions(worker)
    # From 0.30 on, these are of a class of their own.
    return bool(impls) and all(type(each).__name__ == "AscendSFADSACPImpl" or each.enable_dsa_cp for each in impls)


def list_unsupported(engine: Engine, rank: int, stages: int) -> list[str]:
    """Return what would not be supported if the model were a pipeline of so many stages."""
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    config = engine.llm.llm_engine.vllm_config
    with patch.object(config.parallel_config, "pipeline_parallel_size", stages):
        return [str(decline) for decline in get_platform().list_unsupported(config)]


def check_micro_batches(engine: Engine, rank: int, stages: int) -> str | None:
    """Return why the model would have nano-batches only if it were a pipeline of so many stages."""
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    config = engine.llm.llm_engine.vllm_config
    with patch.object(config.parallel_config, "pipeline_parallel_size", stages):
        found = get_platform().check_micro_batches(config)
    return None if found is None else str(found)


def share_builders() -> AbstractContextManager[Any]:
    """Let one builder, which keeps each rank's lengths in buffers of its own, build for all micro-batches."""
    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter

    get_builders = ContextSplitter._get_builders

    def get_one(self: Any, source: Any, count: int) -> Any:
        return get_builders(self, source, 1) * count

    return patch.object(ContextSplitter, "_get_builders", get_one)


def derive_states() -> AbstractContextManager[Any]:
    """Let a micro-batch of decodes be in the state of decodes, whatever else is in its step."""
    return patch("dbo_runtime.vllm_plugin.platforms.npu_metadata.shares_out_tokens", lambda: False)


def answer_without(engine: Engine, rank: int, remove: Callable[[], AbstractContextManager[Any]], prompts: Any) -> Any:
    """Answer in steps cut between requests, without a remedy on any worker."""
    cut_at_boundaries(engine, rank)
    engine.llm.collective_rpc(_remove, args=(remove,))
    try:
        return generate(engine, rank, prompts, 4, ARRIVE)
    finally:
        engine.llm.collective_rpc(_restore)


def _remove(worker: Any, remove: Callable[[], AbstractContextManager[Any]]) -> None:
    worker.removed = ExitStack()
    worker.removed.enter_context(remove())


def _restore(worker: Any) -> None:
    worker.removed.close()
