"""Hook the start-up of vLLM's workers.

`WorkerWrapperBase.init_device` is run by every executor on every platform. After it the worker owns a model runner;
this instance's `load_model` and `profile_run` are wrapped, and the worker's `compile_or_warm_up_model`. When the model
is loaded, the `forward` of that instance is replaced, and that of its vision encoder.

One class is registered: the encoder attention that takes sequence lengths from the host, derived from the class that
is registered at that time. So there is no race with vllm-ascend, which registers its classes before.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from vllm.v1.worker.worker_base import WorkerWrapperBase

from dbo_runtime.config import is_enabled, read_environment

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

_INSTALLED = "_dbo_installed"


def install() -> None:
    """Wrap the worker's start-up. Safe to call any number of times.

    The settings are read when a worker starts: one process may run several engines, one after the other.
    """
    original = WorkerWrapperBase.init_device
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def init_device(self: WorkerBase) -> None:
        original(self)
        if not is_enabled(os.environ):
            return
        # Late: by now vllm-ascend has patched vLLM; names that are imported before would be the unpatched ones.
        from dbo_runtime.vllm_plugin.api.rank_store import announce_rank
        from dbo_runtime.vllm_plugin.install.worker_setup import set_up_worker

        announce_rank()
        set_up_worker(self.worker, read_environment(os.environ), quiet=self.global_rank > 0)

    setattr(init_device, _INSTALLED, True)
    WorkerWrapperBase.init_device = init_device
