"""The process groups of this process, which all engines share whose worker is in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


def make_groups() -> None:
    """Make the groups of one rank, that of its experts included, unless they are there.

    vLLM makes them for its first engine only, and without experts' where that has none: a later one would miss it.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        method = f"file://{tempfile.mkdtemp()}/groups"
        parallel_state.init_distributed_environment(1, 0, method, 0, current_platform.dist_backend)
        parallel_state.initialize_model_parallel()


@contextmanager
def keep_groups() -> Iterator[None]:
    """Let no engine that ends destroy the groups: other engines use them still."""
    from vllm.distributed import parallel_state

    with (
        patch.object(parallel_state, "destroy_model_parallel"),
        patch.object(parallel_state, "destroy_distributed_environment"),
    ):
        yield


def destroy_groups() -> None:
    """Destroy the groups, after the last engine."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
