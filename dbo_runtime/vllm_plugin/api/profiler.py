"""The profiler of vLLM's workers: the threads that it records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def profile_all_threads(worker: WorkerBase) -> bool:
    """Make a worker's torch profiler record all its threads; return whether it has a profiler.

    By default it records only the thread that starts it, but a CPU's lanes are threads. CPU workers create the profiler
    in their constructor. Device workers create it later, but there one thread issues all ops.
    """
    wrapper = getattr(worker, "profiler", None)
    profiler = getattr(wrapper, "profiler", None)
    if not isinstance(profiler, torch.profiler.profile) or profiler.experimental_config is not None:
        return False
    try:
        profiler.experimental_config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # this torch lacks the option
        return False
    return True
