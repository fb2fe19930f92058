"""The install points in an unmodified vLLM.

`WorkerWrapperBase.init_device` is run by every executor on every platform. After it the worker owns a model runner;
that instance's `load_model` is wrapped, and then the `forward` of the loaded model instance is replaced. Nothing is
subclassed or registered, so there is no race with vllm-ascend, which replaces classes of its own.
"""

from __future__ import annotations

import functools
from typing import Any

from dbo_runtime.adapter import ModelAdapter, find_adapter, name_adapter, record_program
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import open_device
from dbo_runtime.observe.logs import open_log
from dbo_runtime.runtime import MicroBatchRuntime
from dbo_runtime.vllm_plugin import compat

_INSTALLED = "_dbo_installed"


def install(config: RuntimeConfig) -> None:
    """Wrap the worker's start-up. Safe to call any number of times."""
    unknown = compat.find_unknown_version()
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
        _wrap_load_model(self.worker.model_runner, config)

    setattr(init_device, _INSTALLED, True)
    WorkerWrapperBase.init_device = init_device


def _wrap_load_model(runner: Any, config: RuntimeConfig) -> None:
    load_model = runner.load_model

    @functools.wraps(load_model)
    def load_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = load_model(*args, **kwargs)
        attach(runner.get_model(), runner.vllm_config, config)
        return result

    runner.load_model = load_and_attach


def attach(model: Any, vllm_config: Any, config: RuntimeConfig) -> None:
    """Replace the forward of a loaded model, unless nobody wrote an adapter for it."""
    from vllm.distributed.parallel_state import get_tp_group

    if _INSTALLED in model.__dict__:
        return  # loaded again into the same instance
    group = get_tp_group()
    architecture = type(model).__name__
    log = open_log(quiet=group.rank_in_group > 0)  # all ranks come to the same; one tells
    adapter = find_adapter(architecture)
    if adapter is None:
        log.warning("every step runs whole", reason=f"no adapter is registered for {architecture}")
        return
    hazard = _find_hazard(adapter, model, vllm_config)
    if hazard is not None:
        log.warning("every step runs whole", reason=hazard, model=architecture)
        return
    model.forward = _make_forward(adapter, model, vllm_config, config, group, log)
    setattr(model, _INSTALLED, True)
    log.info(
        "dual-batch overlap is active",
        model=architecture,
        adapter=name_adapter(adapter),
        device=compat.find_platform()[0],
        ranks=group.world_size,
        transport=compat.find_transport(group),
        mode=config.mode,
        micro_batches=config.micro_batches,
        policy=config.policy[0],
        min_tokens=config.min_tokens,
        min_prefill_tokens=config.min_prefill_tokens,
    )


def _find_hazard(adapter: ModelAdapter, model: Any, vllm_config: Any) -> str | None:
    from dbo_runtime.vllm_plugin.hazards import find_config_hazard

    device, _ = compat.find_platform()
    if device != "cpu":
        return f"there is no device for {device!r} yet"
    return find_config_hazard(vllm_config) or adapter.decline(model)


def _make_forward(
    adapter: ModelAdapter, model: Any, vllm_config: Any, config: RuntimeConfig, group: Any, log: Any
) -> Any:
    from dbo_runtime.vllm_plugin.attention import ContextSplitter, trace_builders
    from dbo_runtime.vllm_plugin.collectives import TensorParallel
    from dbo_runtime.vllm_plugin.forward import SplitForward
    from dbo_runtime.vllm_plugin.thread_state import capture_thread_state

    trace_builders()  # in time: builders are made after the model
    process_group = group.make_sibling_device_group("dbo") if group.world_size > 1 else None
    program = record_program(adapter, model, TensorParallel(group, process_group))
    runtime = MicroBatchRuntime(program, open_device("cpu", capture_state=capture_thread_state), config, log)
    _, out_of_tree = compat.find_platform()
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    splitter = ContextSplitter(vllm_config, cuttable=chunked or not out_of_tree)
    return SplitForward(model, model.forward, runtime, splitter, group)
