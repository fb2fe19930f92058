"""Hook the start of vLLM's workers.

Every executor on every platform runs `WorkerWrapperBase.init_device`. After it, the worker owns a model runner. This
module wraps `load_model` and `profile_run` of this runner, and the worker's `compile_or_warm_up_model`. Once the model
is loaded, the `forward` of the instance and of its vision encoder are replaced.

One class is registered: the encoder attention that takes sequence lengths from the host. It derives from the class
registered at that time, so there is no race with vllm-ascend, which registers its classes earlier.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from vllm.v1.worker.worker_base import WorkerWrapperBase

from dbo_runtime.config import read_environment
from dbo_runtime.setting_sources import is_enabled

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

_INSTALLED = "_dbo_installed"


def install() -> None:
    """Wrap the worker's start. Safe to call any number of times.

    Settings are read when a worker starts, because one process may run several engines in a row.
    """
    original = WorkerWrapperBase.init_device
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def init_device(self: WorkerBase) -> None:
        original(self)
        if not is_enabled(os.environ):
            return
        # Import late: by now vllm-ascend has patched vLLM, and earlier imports would have got the unpatched names.
        from dbo_runtime.vllm_plugin.api.rank_store import announce_rank
        from dbo_runtime.vllm_plugin.install.worker_setup import set_up_worker

        announce_rank()
        set_up_worker(self.worker, read_environment(os.environ), quiet=self.global_rank > 0)

    setattr(init_device, _INSTALLED, True)
    WorkerWrapperBase.init_device = init_device
