"""Wrap the methods of one worker that load, profile and warm up its model."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.api.features import takes_host_lengths
from dbo_runtime.vllm_plugin.api.groups import get_groups
from dbo_runtime.vllm_plugin.api.profiler import profile_all_threads
from dbo_runtime.vllm_plugin.encoder.host_lengths import install_host_lengths
from dbo_runtime.vllm_plugin.install.config_checks import choose_adapter
from dbo_runtime.vllm_plugin.install.cpu_patches import apply_patches
from dbo_runtime.vllm_plugin.install.model_setup import set_up_model
from dbo_runtime.vllm_plugin.install.served_model import ServedModel, get_served_model
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.rehearsal import profile_split, rehearse

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase


def set_up_worker(worker: WorkerBase, config: RuntimeConfig, quiet: bool) -> None:
    """Prepare a worker that has a device and a model runner, but no model yet. *quiet* workers log only errors."""
    platform = get_platform()
    _patch_cpu_build(worker.vllm_config, platform, quiet)
    _install_host_lengths(worker.vllm_config, platform, config)
    if platform.host_computes:  # lanes are threads
        profile_all_threads()
    _wrap_load_model(worker.model_runner, config)
    _wrap_profile_run(worker.model_runner)
    _wrap_warm_up(worker)


def _patch_cpu_build(vllm_config: VllmConfig, platform: Platform, quiet: bool) -> None:
    """Patch the upstream bugs of the CPU build that break features in use, even if nothing is split."""
    parallel = vllm_config.parallel_config
    is_parallel = parallel.enable_expert_parallel or parallel.data_parallel_size * parallel.pipeline_parallel_size > 1
    others = vllm_config.speculative_config, vllm_config.lora_config
    if not platform.needs_cpu_patches or (not is_parallel and others == (None, None)):
        return
    patched, failed = apply_patches()
    log = open_log(quiet=quiet)
    for symptom in patched:
        log.info("patched an upstream bug of vLLM", symptom=symptom)
    for symptom, reason in failed.items():
        log.warning("an upstream bug of vLLM may be there, and is not patched", symptom=symptom, reason=reason)


def _install_host_lengths(vllm_config: VllmConfig, platform: Platform, config: RuntimeConfig) -> None:
    """Make encoders' attention take its lengths from the host, where that has been compared with vLLM's own."""
    if takes_host_lengths(vllm_config) and platform.check_support(config) is None:
        install_host_lengths(bool(config.check))


def _wrap_load_model(runner: GPUModelRunner, config: RuntimeConfig) -> None:
    load_model = runner.load_model

    @functools.wraps(load_model)
    def load_and_set_up(*args: Any, **kwargs: Any) -> Any:
        result = load_model(*args, **kwargs)
        set_up_model(runner, config, choose_adapter(runner.vllm_config))
        return result

    runner.load_model = load_and_set_up


def _wrap_profile_run(runner: GPUModelRunner) -> None:
    """Include a split step in vLLM's memory profile, because the KV cache takes all remaining memory."""
    profile_run = getattr(runner, "profile_run", None)
    if profile_run is None:
        return

    @functools.wraps(profile_run)
    def profile_unsplit_and_split(*args: Any, **kwargs: Any) -> None:
        run = functools.partial(profile_run, *args, **kwargs)
        served = get_served_model(runner.get_model())
        if served is None or served.forward is None:
            run()
        else:
            profile_split(runner, served.forward, get_groups(runner.vllm_config).all_ranks, run)

    runner.profile_run = profile_unsplit_and_split


def _rehearse(runner: GPUModelRunner, served: ServedModel) -> None:
    """Split dummy steps if no memory profile did so: on devices that share their memory with the host.

    Unproven models also do so elsewhere, because the memory profile has no attention.
    """
    if served.forward is not None and (served.rank.platform.host_computes or served.rank.unproven):
        rehearse(runner, served.forward, served.rank.groups.all_ranks)


def _wrap_warm_up(worker: WorkerBase) -> None:
    """Split nothing until vLLM has profiled and compiled, because it measures and compiles unsplit steps."""
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warm_up_and_serve(*args: Any, **kwargs: Any) -> Any:
        runner = worker.model_runner
        served = get_served_model(runner.get_model())
        if served is not None:
            served.start_warm_up()
        result = warm_up(*args, **kwargs)
        if served is not None:
            _rehearse(runner, served)
            served.start_serving(is_final=not hasattr(worker, "dbo_configure"))  # final without `WorkerExtension`
        return result

    worker.compile_or_warm_up_model = warm_up_and_serve
