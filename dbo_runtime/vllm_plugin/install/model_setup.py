"""What is put in the place of a loaded model's forward, and of its vision encoder's, or why nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dbo_runtime.adapter import InputAdapter, ModelAdapter, StageAdapter, name_adapter, record_program
from dbo_runtime.config import RuntimeConfig, name_policy
from dbo_runtime.decline import DeclineError
from dbo_runtime.devices import Device
from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.counts import get_folder
from dbo_runtime.observe.logs import open_log
from dbo_runtime.program import Program
from dbo_runtime.runtime import MicroBatchRuntime
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.install.served_device import has_side_lane, open_served_device
from dbo_runtime.vllm_plugin.platforms import ascend

if TYPE_CHECKING:
    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler
    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
    from dbo_runtime.vllm_plugin.encoder.forward import FoundEncoder
    from dbo_runtime.vllm_plugin.parallel.stage import Stage
    from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics

_ATTACHED = "_dbo_attached"
PROVEN = ("cpu", "npu")  # where split steps of vLLM have been compared with unsplit ones; npu on a stand-in for CANN
DEVICES = (*PROVEN, "cuda")  # named alike by vLLM and by us
COMPARE = "with DBO_CHECK=1 steps are split, and each compared with the unsplit one"
WRITE_ONE = "docs/write-an-adapter.md shows how to write one, and DBO_GENERIC=1 does without"


class Place(NamedTuple):
    """Where this rank stands: with whom it runs a step, and how they communicate; see `compat.get_transport`."""

    groups: compat.Groups
    stage: Stage
    hosts: int
    transport: str


def attach(runner: Any, config: RuntimeConfig, architecture: str, adapter: ModelAdapter | None) -> None:
    """Replace the forward of a loaded model, unless something speaks against splitting it.

    Raises:
        ConfigError: if the ranks were given different settings.
    """
    from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
    from dbo_runtime.vllm_plugin.parallel.stage import any_stage, get_stage

    model, vllm_config = runner.get_model(), runner.vllm_config
    if _ATTACHED in model.__dict__:
        return  # loaded again into the same instance
    groups, stage = compat.get_groups(vllm_config), get_stage(model, vllm_config)
    log = open_log(quiet=groups.all_ranks.rank_in_group > 0)  # all ranks come to the same; one tells, of each stage
    log = log.bind(stage=stage.name) if stage.name else log
    exchange_sizes_separately = compat.get_device_type() != "cpu"
    collectives = ModelCollectives(
        groups.tensor_parallel, groups.data_parallel, config.dispatch, exchange_sizes_separately
    )
    unproven = check_proven(compat.get_device_type(), config)
    if adapter is None and config.generic:
        adapter = _open_generic(groups, vllm_config, stage)
    unproven_model = unproven or check_proven_model(compat.get_device_type(), architecture, config)
    has_side = has_side_lane(compat.get_device_type(), config)
    program = unproven_model or _record(adapter, architecture, model, vllm_config, collectives, stage, has_side)
    encoder = _find_encoder(model, vllm_config, collectives) if stage.is_first and not unproven else None
    hosts = _compare_settings(groups.all_ranks, config, (program, encoder), _votes(vllm_config, groups))
    if isinstance(program, str):
        log.warning("every step runs whole", reason=program, model=architecture)
    if isinstance(encoder, str):
        log.warning("every forward of the vision encoder runs whole", reason=encoder, model=architecture)
    is_split = not isinstance(program, str) or not (encoder is None or isinstance(encoder, str))
    if not any_stage(is_split):
        return
    collectives.connect()  # on all stages: making a communicator takes every rank of vLLM's world
    setattr(model, _ATTACHED, True)
    if not is_split:
        return
    place = Place(groups, stage, hosts, compat.get_transport(groups, hosts))
    device = open_served_device(collectives, config, log)
    metrics = _open_metrics(vllm_config, place)
    if encoder is not None and not isinstance(encoder, str):
        encoder.attach(device, config, groups.tensor_parallel, hosts, metrics, log)
    if isinstance(program, str):
        return
    assert adapter is not None, "it has recorded a program"
    compiler = _make_compiler(vllm_config, collectives, config, log)
    program = program if compiler is None else compiler.wrap(program)
    forward = _make_forward(program, adapter, model, runner, config, place, device, log)
    _observe(forward, config, place, metrics, log)
    forward.compiler = compiler
    forward.costs = _make_cost_source(runner, forward, config, place, log)
    model.forward = forward
    if collectives.fused_attention_reason is not None:
        log.info("attention stays one op, with nothing beside it", reason=collectives.fused_attention_reason)
    _announce(architecture, name_adapter(adapter), config, place, log)


def _announce(architecture: str, adapter: str, config: RuntimeConfig, place: Place, log: Any) -> None:
    """Log what steps are split by."""
    groups, layers = place.groups, place.stage.layers
    log.info(
        "dual-batch overlap is active",
        model=architecture,
        adapter=adapter,
        layers=f"{layers.start} to {layers.stop - 1}" if layers else None,
        device=compat.get_device_type(),
        ranks=groups.all_ranks.world_size,
        data_parallel=1 if groups.data_parallel is None else groups.data_parallel.world_size,
        transport=place.transport,
        mode=config.mode,
        micro_batches=config.micro_batches or "auto",
        policy=name_policy(*config.policy),
        dispatch=config.dispatch,
        side=config.side,
        min_tokens=config.min_tokens,
        min_prefill_tokens=config.min_prefill_tokens,
        check=int(config.check),
    )
    if compat.get_device_type() == "npu" and not config.check:
        log.warning("no NPU has run this yet, only a stand-in for CANN", advice="compare steps once, with DBO_CHECK=1")


def check_proven(platform: str, config: RuntimeConfig) -> str | None:
    """Return why *platform* is not served split, or None. Nobody's answers are an experiment by default."""
    if platform not in DEVICES:
        return f"there is no device for {platform!r}"
    unproven = None if platform in PROVEN else f"not proven on {platform!r} yet"
    if platform == "npu":
        unproven = ascend.check_version()
    return None if unproven is None or config.check else f"{unproven}; {COMPARE}"


def check_proven_model(platform: str, architecture: str, config: RuntimeConfig) -> str | None:
    """Return why steps of a model are not split on *platform* where others' are, or None."""
    if platform != "npu" or architecture in ascend.KNOWN_MODELS or config.check:
        return None
    return f"{architecture} is not proven beside vllm-ascend yet; {COMPARE}"


def _open_generic(groups: compat.Groups, vllm_config: Any, stage: Stage) -> ModelAdapter:
    from dbo_runtime.vllm_plugin.alternatives.generic import GenericAdapter

    return GenericAdapter(groups.tensor_parallel, vllm_config, stage)


def _record(
    adapter: ModelAdapter | None,
    architecture: str,
    model: Any,
    vllm_config: Any,
    collectives: Any,
    stage: Stage,
    has_side: bool,
) -> Program | str:
    """Return the program of this model, or why it runs whole."""
    from dbo_runtime.vllm_plugin.context.checks import check_config

    if adapter is None:
        return f"no adapter is registered for {architecture}; {WRITE_ONE}"
    refusal = check_config(vllm_config) or check_stage(adapter, stage) or adapter.decline(model)
    if refusal is not None:
        return refusal
    try:
        program = record_program(adapter, model, collectives, has_side)
    except DeclineError as error:
        return str(error)
    return stage.check_program(program) or program


def check_stage(adapter: ModelAdapter, stage: Stage) -> str | None:
    """Return why an adapter need not even look at this stage of a pipeline, or None."""
    if stage.count > 1 and not stage.layers:
        return f"stage {stage.number} of {stage.count} has no layers"
    if stage.count > 1 and not (isinstance(adapter, StageAdapter) and adapter.takes_stages):
        return f"{name_adapter(adapter)} takes whole models only, no stages of a pipeline"
    return None


def _votes(vllm_config: Any, groups: compat.Groups) -> bool:
    """Return whether one rank may see reasons against a step that the others cannot: in its own prefix cache."""
    return groups.data_parallel is not None and bool(vllm_config.cache_config.enable_prefix_caching)


def _find_encoder(model: Any, vllm_config: Any, collectives: Any) -> FoundEncoder | str | None:
    """Return the vision encoder of this model, why it runs whole, or None if there is none."""
    if vllm_config.model_config.multimodal_config is None:
        return None
    from dbo_runtime.vllm_plugin.encoder.forward import find_encoder

    return find_encoder(model, vllm_config, collectives)


def _compare_settings(group: Any, config: RuntimeConfig, found: Sequence[Any], votes: bool) -> int:
    """Compare the settings of all ranks once: with others they would decide differently later, and hang.

    Returns:
        On how many hosts the ranks are.
    """
    from dbo_runtime.vllm_plugin.parallel.agreement import format_ranks, gather

    model, encoder = (thing if isinstance(thing, str | None) else "can be split" for thing in found)
    own = f"{config}, model: {model}, encoder: {encoder}, votes: {votes}, {compat.describe_versions()}"
    said = gather(group, (own, compat.get_host()))
    settings = [words for words, _ in said]
    if len(set(settings)) > 1:
        raise ConfigError(f"give all ranks on all hosts the same settings and packages. {format_ranks(settings)}")
    return len({host for _, host in said})


def open_splitter(vllm_config: Any, runner: Any) -> ContextSplitter:
    """Return what makes forward contexts of micro-batches on the platform that serves."""
    if compat.get_device_type() == "npu":
        from dbo_runtime.vllm_plugin.platforms.ascend_contexts import AscendContextSplitter

        return AscendContextSplitter(vllm_config, runner)
    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter

    return ContextSplitter(vllm_config, runner)


def _make_forward(
    program: Program,
    adapter: ModelAdapter,
    model: Any,
    runner: Any,
    config: RuntimeConfig,
    place: Place,
    device: Device,
    log: Any,
) -> Any:
    from dbo_runtime.vllm_plugin.context.splitter import trace_builders
    from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
    from dbo_runtime.vllm_plugin.step.decision import StepDecider
    from dbo_runtime.vllm_plugin.step.forward import SplitForward

    groups = place.groups
    trace_builders()  # in time: builders are made after the model
    vllm_config = runner.vllm_config
    runtime = MicroBatchRuntime(program, device, config, log, groups.all_ranks.world_size)
    agreement = Agreement(groups.all_ranks, _votes(vllm_config, groups))
    rank = None if groups.data_parallel is None else groups.data_parallel.rank_in_group
    planner = StepDecider(runtime, open_splitter(vllm_config, runner), agreement, place.transport, rank)
    planner.serving = False  # until vLLM has warmed up
    add_inputs = adapter.take_inputs if isinstance(adapter, InputAdapter) else None
    return SplitForward(model, model.forward, runtime, planner, agreement, add_inputs, place.stage)


def _make_compiler(vllm_config: Any, collectives: Any, config: RuntimeConfig, log: Any) -> OpCompiler | None:
    if not config.compile:
        return None
    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler

    return OpCompiler(vllm_config, collectives, log)


def _open_metrics(vllm_config: Any, place: Place) -> Metrics | None:
    """Return what counts on this rank: the first tensor parallel one counts for all, which do the same.

    Of a pipeline, that of the first stage: a step that passes several stages is one step.
    """
    folder = get_folder()
    if folder is None or place.groups.tensor_parallel.rank_in_group > 0 or not place.stage.is_first:
        return None
    from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics

    name, engine = vllm_config.model_config.served_model_name, vllm_config.parallel_config.data_parallel_index
    return Metrics(folder, name, engine)


def _observe(forward: Any, config: RuntimeConfig, place: Place, metrics: Metrics | None, log: Any) -> None:
    """Let a forward trace and count what it does."""
    from dbo_runtime.vllm_plugin.telemetry.sampling import Recording
    from dbo_runtime.vllm_plugin.telemetry.traces import TraceFolder

    traces = None
    if config.trace:
        group, device = place.groups.all_ranks, forward.runtime.device
        traces = TraceFolder(config.trace, config.trace_steps, group, device, log, place.stage.name)
    forward.metrics, forward.recording = metrics, Recording(traces, metrics)


def _make_cost_source(runner: Any, forward: Any, config: RuntimeConfig, place: Place, log: Any) -> Any:
    from dbo_runtime.vllm_plugin.calibration.cost_source import CostSource, Identity

    vllm_config = runner.vllm_config
    hidden = vllm_config.model_config.get_hidden_size()
    identity = Identity(
        machine={**compat.describe_machine(), "transport": place.transport, "dispatch": config.dispatch},
        model=compat.describe_model(vllm_config),
        parallel={**compat.describe_parallel(vllm_config, place.hosts), **place.stage.describe()},
        versions=compat.describe_packages(),
        bytes_per_token=float(hidden * vllm_config.model_config.dtype.itemsize),
    )
    return CostSource(runner, forward, place.groups.all_ranks, identity, log, place.stage.name)
