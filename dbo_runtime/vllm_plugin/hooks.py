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
from dbo_runtime.errors import ConfigError, UnsupportedError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.program import Program
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
        _mend_platform()
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
    from vllm.distributed.parallel_state import get_dp_group, get_tp_group, get_world_group

    from dbo_runtime.vllm_plugin.collectives import ModelCollectives

    if _INSTALLED in model.__dict__:
        return  # loaded again into the same instance
    everyone, data_parallel = get_world_group(), get_dp_group()
    log = open_log(quiet=everyone.rank_in_group > 0)  # all ranks come to the same; one tells
    collectives = ModelCollectives(
        get_tp_group(), data_parallel if data_parallel.world_size > 1 else None, config.dispatch
    )
    program = _record(adapter, architecture, model, vllm_config, collectives)
    hosts = _compare_settings(everyone, config, program)
    if adapter is None or isinstance(program, str):
        log.warning("every step runs whole", reason=program, model=architecture)
        return
    collectives.connect()
    transport = compat.find_transport(everyone, get_tp_group(), hosts)
    model.forward = _make_forward(program, model, vllm_config, config, transport, log)
    setattr(model, _INSTALLED, True)
    log.info(
        "dual-batch overlap is active",
        model=architecture,
        adapter=name_adapter(adapter),
        device=compat.find_platform(),
        ranks=everyone.world_size,
        data_parallel=data_parallel.world_size,
        transport=transport,
        mode=config.mode,
        micro_batches=config.micro_batches,
        policy=name_policy(*config.policy),
        dispatch=config.dispatch,
        min_tokens=config.min_tokens,
        min_prefill_tokens=config.min_prefill_tokens,
        check=int(config.check),
    )


def _mend_platform() -> None:
    """Mend what of this vLLM expert parallel needs on CPU, split or not."""
    if compat.find_platform() != "cpu":
        return
    from dbo_runtime.vllm_plugin.cpu_gaps import mend_gaps

    for symptom in mend_gaps():
        open_log().info("mended a fault of vLLM", symptom=symptom)


def _record(
    adapter: ModelAdapter | None, architecture: str, model: Any, vllm_config: Any, collectives: Any
) -> Program | str:
    """Return the program of this model, or why it runs whole."""
    from dbo_runtime.vllm_plugin.hazards import find_config_hazard

    if adapter is None:
        return f"no adapter is registered for {architecture}"
    device = compat.find_platform()
    if device != "cpu":
        return f"there is no device for {device!r} yet"
    refusal = find_config_hazard(vllm_config) or adapter.decline(model)
    if refusal is not None:
        return refusal
    try:
        return record_program(adapter, model, collectives)
    except UnsupportedError as error:
        return str(error)


def _compare_settings(group: Any, config: RuntimeConfig, program: Program | str) -> int:
    """Compare the settings of all ranks once: with others they would decide differently later, and hang.

    Returns:
        On how many hosts the ranks are.
    """
    from dbo_runtime.vllm_plugin.agreement import gather

    can_split = program if isinstance(program, str) else "can be split"
    said = gather(group, (f"{config}, {can_split}", compat.find_host()))
    settings = [own for own, _ in said]
    if len(set(settings)) > 1:
        told = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(settings))
        raise ConfigError(f"give all ranks on all hosts the same settings and packages. {told}")
    return len({host for _, host in said})


def _make_forward(
    program: Program, model: Any, vllm_config: Any, config: RuntimeConfig, transport: str, log: Any
) -> Any:
    from vllm.distributed.parallel_state import get_world_group

    from dbo_runtime.vllm_plugin.agreement import Agreement
    from dbo_runtime.vllm_plugin.attention import ContextSplitter, trace_builders
    from dbo_runtime.vllm_plugin.forward import SplitForward
    from dbo_runtime.vllm_plugin.step_planner import StepPlanner
    from dbo_runtime.vllm_plugin.thread_state import capture_thread_state

    trace_builders()  # in time: builders are made after the model
    parallel = vllm_config.parallel_config
    everyone = get_world_group()
    device = open_device("cpu", capture_state=capture_thread_state)
    runtime = MicroBatchRuntime(program, device, config, log, everyone.world_size)
    votes = parallel.data_parallel_size > 1 and bool(vllm_config.cache_config.enable_prefix_caching)
    agreement = Agreement(everyone, votes)
    planner = StepPlanner(runtime, ContextSplitter(vllm_config), agreement, transport, rank=parallel.data_parallel_rank)
    return SplitForward(model, model.forward, runtime, planner, agreement)
