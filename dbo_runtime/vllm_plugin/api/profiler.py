"""The profiler of vLLM's workers: the threads that it records."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.profiler.wrapper import TorchProfilerWrapper


def profile_all_threads() -> None:
    """Make vLLM's torch profiler record all threads of this process. Safe to call repeatedly.

    By default it records only the thread that starts it, but a CPU's lanes are threads.
    """
    from vllm.profiler.wrapper import TorchProfilerWrapper

    start = TorchProfilerWrapper._start
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    def start_for_all_threads(wrapper: TorchProfilerWrapper) -> None:
        _include_all_threads(wrapper)
        start(wrapper)

    TorchProfilerWrapper._start = start_for_all_threads


def _include_all_threads(wrapper: TorchProfilerWrapper) -> None:
    """Configure the profiler that is about to start, unless it has a configuration of this kind."""
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # this torch lacks the option
        return
    options = getattr(wrapper, "_profiler_kwargs", None)
    if options is not None:  # from vLLM 0.32 on, of the profiler that each start makes
        options.setdefault("experimental_config", config)
    elif wrapper.profiler.experimental_config is None:
        wrapper.profiler.experimental_config = config
