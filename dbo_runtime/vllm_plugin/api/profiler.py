"""The profiler of vLLM's workers: which of its threads it records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


def profile_all_threads(worker: WorkerBase) -> bool:
    """Let the torch profiler of a worker record all its threads; return whether there is one to tell.

    By default it records only the thread that starts it, and a CPU's lanes are threads. Workers of CPUs make it when
    they are made themselves; those of devices make it later, and there one thread issues all ops.
    """
    wrapper = getattr(worker, "profiler", None)
    profiler = getattr(wrapper, "profiler", None)
    if not isinstance(profiler, torch.profiler.profile) or profiler.experimental_config is not None:
        return False
    try:
        profiler.experimental_config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # a torch without this option
        return False
    return True
