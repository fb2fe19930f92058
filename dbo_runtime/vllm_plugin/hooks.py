"""The install points in an unmodified vLLM.

`WorkerWrapperBase.init_device` is run by every executor on every platform. After it the worker owns a model runner;
that instance's `load_model` is wrapped, and then the `forward` of the loaded model instance is replaced. Nothing is
subclassed or registered, so there is no race with vllm-ascend, which replaces classes of its own.
"""

from __future__ import annotations

import functools
from typing import Any

from dbo_runtime.adapter import ModelAdapter, find_adapter, name_adapter, record_program
from dbo_runtime.config import RuntimeConfig, name_policy
from dbo_runtime.devices import open_device
from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.runtime import MicroBatchRuntime
from dbo_runtime.vllm_plugin import compat

_INSTALLED = "_dbo_installed"


def install(config: RuntimeConfig) -> None:
    """Wrap the worker's start-up. Safe to call any number of times."""
    compat.pass_settings_on()
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
        architecture = runner.vllm_config.model_config.architecture
        adapter = find_adapter(architecture)  # before the weights: an adapter that is wrong should not cost their time
        result = load_model(*args, **kwargs)
        attach(runner.get_model(), runner.vllm_config, config, architecture, adapter)
        return result

    runner.load_model = load_and_attach


def attach(
    model: Any, vllm_config: Any, config: RuntimeConfig, architecture: str, adapter: ModelAdapter | None
) -> None:
    """Replace the forward of a loaded model, unless something speaks against splitting it.

    Raises:
        ConfigError: if the ranks were given different settings.
    """
    from vllm.distributed.parallel_state import get_tp_group

    if _INSTALLED in model.__dict__:
        return  # loaded again into the same instance
    group = get_tp_group()
    log = open_log(quiet=group.rank_in_group > 0)  # all ranks come to the same; one tells
    refusal = _find_refusal(adapter, architecture, model, vllm_config)
    _check_settings(group, config, refusal)
    if adapter is None or refusal is not None:
        log.warning("every step runs whole", reason=refusal, model=architecture)
        return
    model.forward = _make_forward(adapter, model, vllm_config, config, group, log)
    setattr(model, _INSTALLED, True)
    log.info(
        "dual-batch overlap is active",
        model=architecture,
        adapter=name_adapter(adapter),
        device=compat.find_platform(),
        ranks=group.world_size,
        transport=compat.find_transport(group),
        mode=config.mode,
        micro_batches=config.micro_batches,
        policy=name_policy(*config.policy),
        min_tokens=config.min_tokens,
        min_prefill_tokens=config.min_prefill_tokens,
        check=int(config.check),
    )


def _find_refusal(adapter: ModelAdapter | None, architecture: str, model: Any, vllm_config: Any) -> str | None:
    from dbo_runtime.vllm_plugin.hazards import find_config_hazard

    if adapter is None:
        return f"no adapter is registered for {architecture}"
    device = compat.find_platform()
    if device != "cpu":
        return f"there is no device for {device!r} yet"
    return find_config_hazard(vllm_config) or adapter.decline(model)


def _check_settings(group: Any, config: RuntimeConfig, refusal: str | None) -> None:
    """Compare the settings of all ranks once: with others they would decide differently later, and hang."""
    from dbo_runtime.vllm_plugin.agreement import find_disagreement

    disagreement = find_disagreement(group, f"{config}, {refusal or 'can be split'}")
    if disagreement is not None:
        raise ConfigError(f"give all ranks on all hosts the same settings and packages. {disagreement}")


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
    return SplitForward(model, model.forward, runtime, ContextSplitter(vllm_config), group)
