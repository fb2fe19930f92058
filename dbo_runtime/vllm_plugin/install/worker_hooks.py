"""The install points in an unmodified vLLM.

`WorkerWrapperBase.init_device` is run by every executor on every platform. After it the worker owns a model runner;
that instance's `load_model` and `profile_run` are wrapped, the worker's `compile_or_warm_up_model`, and then the
`forward` of the loaded model instance is replaced, and its vision encoder's. No class is registered but the one that
hands an encoder's attention its lengths, on top of whatever is there then: so there is no race with vllm-ascend, which
replaces classes of its own, and has by then.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from dbo_runtime.adapter import get_adapter
from dbo_runtime.config import RuntimeConfig, is_enabled, read_environment
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.install.model_setup import attach, check_proven

_INSTALLED = "_dbo_installed"


def install() -> None:
    """Wrap the worker's start-up. Safe to call any number of times.

    The settings are read when a worker starts: one process may run several engines, one after the other.
    """
    compat.pass_settings_on()
    unknown = compat.check_version()
    if unknown is not None:
        open_log().warning("every step runs whole", reason=unknown)
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def init_device(self: Any) -> None:
        original(self)
        if not is_enabled(os.environ):
            return
        config = read_environment(os.environ)
        _mend_platform(self.vllm_config.parallel_config, quiet=self.global_rank > 0)
        _plan_on_host(self.vllm_config, config)
        _wrap_load_model(self.worker.model_runner, config)
        _wrap_profile_run(self.worker.model_runner)
        _wrap_warm_up(self.worker)

    setattr(init_device, _INSTALLED, True)
    WorkerWrapperBase.init_device = init_device


def _plan_on_host(vllm_config: Any, config: RuntimeConfig) -> None:
    """Let encoders' attention have its lengths from the host, where that has been compared with what it was.

    Not where encoders are compiled or captured: lengths are integers, and those of the first images would stay.
    """
    if vllm_config.model_config.multimodal_config is None or check_proven(compat.get_device_type(), config) is not None:
        return
    compilation = vllm_config.compilation_config
    if compilation.compile_mm_encoder or compilation.cudagraph_mm_encoder:
        return
    from dbo_runtime.vllm_plugin.encoder.host_lengths import install_host_lengths

    install_host_lengths(config.check)


def _wrap_load_model(runner: Any, config: RuntimeConfig) -> None:
    load_model = runner.load_model

    @functools.wraps(load_model)
    def load_and_attach(*args: Any, **kwargs: Any) -> Any:
        architecture = runner.vllm_config.model_config.architecture
        adapter = get_adapter(architecture)  # before the weights: an adapter that is wrong should not cost their time
        result = load_model(*args, **kwargs)
        attach(runner, config, architecture, adapter)
        return result

    runner.load_model = load_and_attach


def _wrap_profile_run(runner: Any) -> None:
    """Let vLLM's memory profiling see a split step, because its KV cache takes what is left."""
    profile_run = getattr(runner, "profile_run", None)
    if profile_run is None:
        return

    @functools.wraps(profile_run)
    def profile_whole_and_split(*args: Any, **kwargs: Any) -> None:
        from dbo_runtime.vllm_plugin.step.memory_profile import profile_split

        everyone = compat.get_groups(runner.vllm_config).all_ranks
        profile_split(runner, everyone, functools.partial(profile_run, *args, **kwargs))

    runner.profile_run = profile_whole_and_split


def _wrap_warm_up(worker: Any) -> None:
    """Split nothing before vLLM has profiled and compiled: what it measures and compiles there are whole steps."""
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warm_up_and_serve(*args: Any, **kwargs: Any) -> Any:
        from dbo_runtime.vllm_plugin.encoder.forward import get_encoder
        from dbo_runtime.vllm_plugin.step.forward import SplitForward

        result = warm_up(*args, **kwargs)
        forward = worker.model_runner.get_model().forward
        if isinstance(forward, SplitForward):
            if forward.compiler is not None:  # before costs, which are those of what is served
                forward.compiler.compile(forward.runtime.program)
            if forward.costs is not None:
                forward.costs.prepare(forward.runtime.config)
            forward.planner.serving = True
        encoder = get_encoder(worker.model_runner.get_model())
        if encoder is not None:
            encoder.serving = True
        return result

    worker.compile_or_warm_up_model = warm_up_and_serve


def _mend_platform(parallel: Any, quiet: bool) -> None:
    """Mend what of this vLLM expert, data and pipeline parallel need on CPU, split or not."""
    sizes = parallel.data_parallel_size, parallel.pipeline_parallel_size
    if compat.get_device_type() != "cpu" or not (parallel.enable_expert_parallel or max(sizes) > 1):
        return
    from dbo_runtime.vllm_plugin.install.cpu_patches import apply_patches

    for symptom in apply_patches():
        open_log(quiet=quiet).info("mended a fault of vLLM", symptom=symptom)
