"""Set up a loaded model: record the programs of the model and its vision encoder, and install splitting forwards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dbo_runtime.adapters.contract import InputAdapter, ModelAdapter, name_adapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.counts import get_folder
from dbo_runtime.observe.declines import warn_declined
from dbo_runtime.vllm_plugin.api.features import may_diverge, mistakes_one_token
from dbo_runtime.vllm_plugin.api.groups import dispatches_chunks
from dbo_runtime.vllm_plugin.api.kv_agent import read_transfer_config
from dbo_runtime.vllm_plugin.api.kv_connectors import has_layer_hooks
from dbo_runtime.vllm_plugin.api.metadata_source import trace_builders
from dbo_runtime.vllm_plugin.api.versions import describe_versions, get_version, is_tested
from dbo_runtime.vllm_plugin.api.window import describe_tested
from dbo_runtime.vllm_plugin.context.lora_mapping import make_lora_mapping
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.encoder.forward import SplitEncoder
from dbo_runtime.vllm_plugin.encoder.program import EncoderProgram, record_encoder
from dbo_runtime.vllm_plugin.install.announcement import Announcement
from dbo_runtime.vllm_plugin.install.cost_identity import make_identity
from dbo_runtime.vllm_plugin.install.cost_source import CostSource
from dbo_runtime.vllm_plugin.install.rank_presence import require_all_ranks
from dbo_runtime.vllm_plugin.install.recorded_model import RecordedModel, record_model
from dbo_runtime.vllm_plugin.install.served_model import ServedModel, get_served_model
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement, format_ranks, gather
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext, make_rank_context
from dbo_runtime.vllm_plugin.parallel.stage import any_stage
from dbo_runtime.vllm_plugin.platforms.platform import tell_to_compare
from dbo_runtime.vllm_plugin.step.comparison import StepComparison
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.first_steps import COMPARED_STEPS, FirstSteps
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.model_ends import ModelEnds
from dbo_runtime.vllm_plugin.step.observer import StepObserver
from dbo_runtime.vllm_plugin.step.runner import StepRunner
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.sampling import Recording
from dbo_runtime.vllm_plugin.telemetry.traces import TraceFolder

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler


def set_up_model(runner: GPUModelRunner, config: RuntimeConfig, adapter: ModelAdapter | Decline | None) -> None:
    """Replace the forwards of a loaded model and of its vision encoder by splitting ones. Collective.

    If one of them cannot be split, log why and leave it unchanged.

    Raises:
        ConfigError: ranks have different settings, or this package is enabled only on some of them.
    """
    model = runner.get_model()
    if get_served_model(model) is not None:
        return  # weights were loaded again into the same instance
    require_all_ranks()
    rank = make_rank_context(model, runner.vllm_config, config)
    groups = rank.groups
    experts = groups.all_ranks if dispatches_chunks(rank.vllm_config, rank.dispatch, model) else None
    ranks = groups.tensor_parallel, groups.data_parallel
    collectives = ModelCollectives(rank.platform, *ranks, rank.dispatch, experts)
    recorded = record_model(adapter, model, rank, collectives)
    encoder = _record_encoder(model, rank, collectives)
    _compare_settings(rank, recorded, encoder)
    metrics = _open_metrics(rank)
    _report_declines(rank, recorded, encoder, metrics)
    is_split = isinstance(recorded, RecordedModel) or isinstance(encoder, EncoderProgram)
    if not any_stage(is_split):
        return
    if not is_tested():
        rank.log.warning(
            "this version of vLLM is untested: first steps are compared with unsplit ones",
            vllm=get_version(),
            tested=describe_tested(),
            steps_of_each_kind=COMPARED_STEPS,
        )
    if rank.unproven:
        rank.log.warning(
            "not proven with this platform yet: first steps are compared with unsplit ones",
            platform=rank.platform.name,
            unproven="; ".join(rank.unproven),
            steps_of_each_kind=COMPARED_STEPS,
        )
    collectives.connect()  # on all stages, because every rank of vLLM's world must take part
    served = ServedModel(rank)
    if is_split:
        device = rank.platform.open_device(collectives.process_groups, config, rank.log)
        if isinstance(encoder, EncoderProgram):
            served.encoder = _make_encoder(encoder, rank, device, metrics)
        if isinstance(recorded, RecordedModel):
            if rank.config.compile:
                served.compiler = _make_compiler(runner, recorded.adapter, rank, collectives)
            _set_up_steps(served, runner, recorded, device, metrics)
            fused = collectives.fused_attention_reason
            served.announcement = Announcement(rank, recorded.adapter, fused, recorded.no_micro)
    served.install(model)


def _report_declines(
    rank: RankContext,
    model: RecordedModel | Decline,
    encoder: EncoderProgram | Decline | None,
    metrics: Metrics | None,
) -> None:
    """Log what is not split, and count the reason if no step is."""
    architecture = rank.vllm_config.model_config.architecture
    if isinstance(model, Decline):
        warn_declined(rank.log, "every step", model, model=architecture)
        if metrics is not None:
            metrics.count_standing(model)
    if isinstance(encoder, Decline):
        warn_declined(rank.log, "every forward of the vision encoder", encoder, model=architecture)


def _record_encoder(
    model: VllmModel, rank: RankContext, collectives: ModelCollectives
) -> EncoderProgram | Decline | None:
    """Return the program of the vision encoder, or a decline; None if this rank has no encoder."""
    has_encoder = rank.vllm_config.model_config.multimodal_config is not None and rank.stage.is_first
    if not has_encoder or rank.platform.check_support(rank.config) is not None:
        return None
    encoder = record_encoder(model, rank.vllm_config, rank.platform, collectives)
    if isinstance(encoder, Decline) or rank.config.check:
        return encoder
    unproven = rank.platform.check_encoder(type(encoder.module).__name__)
    return encoder if unproven is None else tell_to_compare(unproven)


def _compare_settings(
    rank: RankContext, recorded: RecordedModel | Decline, encoder: EncoderProgram | Decline | None
) -> None:
    """Raise ConfigError if ranks have different settings: later they would decide differently, and hang. Collective."""
    outcomes = (str(one) if isinstance(one, Decline | None) else "can be split" for one in (recorded, encoder))
    model, images = outcomes
    if isinstance(recorded, RecordedModel) and recorded.no_micro is not None:
        model = f"nano-batches only: {recorded.no_micro}"
    unproven = "; ".join(rank.unproven) or "nothing"
    own = f"{rank.config}, model: {model}, encoder: {images}, dispatch: {rank.dispatch}, unproven: {unproven}, "
    settings = gather(rank.groups.all_ranks, own + describe_versions())
    if len(set(settings)) > 1:
        raise ConfigError(f"give all ranks on all hosts the same settings and packages. {format_ranks(settings)}")


def _make_encoder(encoder: EncoderProgram, rank: RankContext, device: Device, metrics: Metrics | None) -> SplitEncoder:
    """Make the splitting forward of a vision encoder, which the tensor parallel ranks share."""
    group = rank.groups.tensor_parallel
    transport = rank.platform.get_transport(rank.groups._replace(data_parallel=None, all_ranks=group), rank.hosts)
    runtime = MicroBatchRuntime(encoder.program, device, rank.config, rank.log, group.world_size)
    rank.log.info(
        "the vision encoder overlaps as well",
        encoder=type(encoder.module).__name__,
        adapter=name_adapter(encoder.adapter),
        transport=transport,
    )
    agreement = Agreement(group, count=None if metrics is None else metrics.count_disagreement)
    split = SplitEncoder(encoder.module, encoder.adapter, runtime, transport, agreement, metrics, group)
    split.first_steps = _make_first_steps(rank)
    return split


def _set_up_steps(
    served: ServedModel,
    runner: GPUModelRunner,
    recorded: RecordedModel,
    device: Device,
    metrics: Metrics | None,
) -> None:
    """Make the parts that split a model's steps, up to serving."""
    rank, program = served.rank, recorded.program
    if served.compiler is not None:
        program = served.compiler.wrap(program)
    hooked = has_layer_hooks(read_transfer_config(rank.vllm_config))
    ranks = rank.groups.all_ranks.world_size
    runtime = MicroBatchRuntime(program, device, rank.config, rank.log, ranks, hooked, TENSOR_ROWS)
    served.forward = _make_forward(runner, runtime, recorded, rank, metrics)
    served.costs = CostSource(runner, served.forward, make_identity(rank), rank, metrics)


def _make_compiler(
    runner: GPUModelRunner, adapter: ModelAdapter, rank: RankContext, collectives: ModelCollectives
) -> OpCompiler:
    """Make the compiler of ops, with inputs as on the first stage, including the data that the adapter adds."""
    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler  # for few servers

    add_inputs = None
    if isinstance(adapter, InputAdapter) and rank.stage.is_first:
        add_inputs = partial(adapter.take_inputs, runner.get_model(), keep=True)
    return OpCompiler(rank.vllm_config, collectives, rank.log, rank.groups.all_ranks, add_inputs)


def _make_forward(
    runner: GPUModelRunner,
    runtime: MicroBatchRuntime,
    recorded: RecordedModel,
    rank: RankContext,
    metrics: Metrics | None,
) -> SplitForward:
    trace_builders()  # do this now, because vLLM makes builders after the model
    model, data_parallel = runner.get_model(), rank.groups.data_parallel
    count = None if metrics is None else metrics.count_disagreement
    agreement = Agreement(rank.groups.all_ranks, count)
    splitter = ContextSplitter(rank.platform, rank.vllm_config, runner, rank.dispatch)
    number = None if data_parallel is None else data_parallel.rank_in_group
    lora = make_lora_mapping(model)
    assert not isinstance(lora, Decline), "then it has no program"
    ends = ModelEnds(model, runtime.program, recorded.adapter, rank.stage, recorded.head)
    decider = StepDecider(runtime, splitter, agreement, rank.transport, number)
    decider.first_steps, decider.no_micro = _make_first_steps(rank, recorded.no_micro), recorded.no_micro
    runtime.prepare(decider.limit(rank.config))
    forward = SplitForward(
        model,
        decider,
        StepRunner(runtime, ends, rank.platform, lora),
        StepObserver(runtime, agreement, Recording(_open_traces(rank, runtime.device), metrics), metrics),
        StepComparison(
            agreement,
            decider,
            ends.may_repeat and may_diverge(rank.vllm_config),
            lora,
            mistakes_one_token(rank.vllm_config, model),
        ),
    )
    forward.phase = Phase.STARTING
    return forward


def _make_first_steps(rank: RankContext, no_micro: Decline | None = None) -> FirstSteps | None:
    """Return the count of first steps, if these are compared: what has no micro-batches was proven for few models."""
    is_compared = rank.platform.compares_first_steps or bool(rank.unproven) or no_micro is not None
    return FirstSteps(rank.log) if is_compared or not is_tested() else None


def _open_metrics(rank: RankContext) -> Metrics | None:
    """Return the counts of this rank. The first tensor parallel rank counts for all, because they run the same steps.

    In a pipeline, only the first stage counts: a step that passes several stages is one step.
    """
    folder = get_folder()
    if folder is None or rank.groups.tensor_parallel.rank_in_group > 0 or not rank.stage.is_first:
        return None
    config = rank.vllm_config
    name, engine = config.model_config.served_model_name, config.parallel_config.data_parallel_index
    return Metrics(folder, name, engine, rank.log, asks_costs=bool(rank.config.costs or rank.config.calibrate))


def _open_traces(rank: RankContext, device: Device) -> TraceFolder | None:
    config = rank.config
    if not config.trace:
        return None
    return TraceFolder(config.trace, config.trace_steps, rank.groups.all_ranks, device, rank.log, rank.stage.name)
