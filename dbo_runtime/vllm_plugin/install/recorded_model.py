"""Record the program of a loaded model, or find the reason why its steps are not split."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dbo_runtime.adapters.contract import ModelAdapter, record_program
from dbo_runtime.adapters.registry import get_adapter
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import COMM
from dbo_runtime.ir.program import Program
from dbo_runtime.vllm_plugin.alternatives.generic import GenericAdapter
from dbo_runtime.vllm_plugin.context.lora_mapping import make_lora_mapping
from dbo_runtime.vllm_plugin.install.config_checks import find_decline, list_declines
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext
from dbo_runtime.vllm_plugin.parallel.stage import Stage
from dbo_runtime.vllm_plugin.step.failures import call_adapter
from dbo_runtime.vllm_plugin.step.head import Head, find_head

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


class RecordedModel(NamedTuple):
    """A model that can be split, with its adapter and its recorded program.

    Attributes:
        head: the work that the forward does besides the program; None if none.
        no_micro: reason for which steps are cut into nano-batches only; None if micro-batches are possible, too.
    """

    adapter: ModelAdapter
    program: Program
    head: Head | None
    no_micro: Decline | None = None


def record_model(
    adapter: ModelAdapter | Decline | None, model: VllmModel, rank: RankContext, collectives: ModelCollectives
) -> RecordedModel | Decline:
    """Return a model's program on this rank, or a decline. Collective."""
    adapter = _prefer_generic(adapter, model, rank)
    declines = list(list_declines(rank.vllm_config, rank.config, adapter))
    decline = find_decline(declines, rank.config)
    if decline is not None:
        return decline
    assert not isinstance(adapter, Decline | None), "without one, models are declined"
    decline = _check_stage(rank.stage) or _check_backbone(adapter, model, rank)
    if decline is not None:
        return decline
    unfit = call_adapter(adapter, partial(adapter.decline, model))
    if unfit is not None:
        declines.append(unfit)
    decline = find_decline(declines, rank.config)
    if decline is not None:
        return decline
    rank.platform.prepare_model(model)
    lora = make_lora_mapping(model)
    if isinstance(lora, Decline):
        return lora
    has_side = rank.platform.opens_side_lane(rank.config)
    program = call_adapter(adapter, partial(record_program, adapter, model, collectives, has_side))
    if isinstance(program, Decline):
        return program
    no_micro = next(iter(declines), None)
    is_whole = no_micro is not None and not any(op.token_wise and op.lane == COMM for op in program.ops)
    decline = no_micro if is_whole else rank.stage.check_program(program)
    if decline is not None:
        return decline
    head = None if isinstance(adapter, GenericAdapter) else find_head(model, rank.vllm_config)
    return head if isinstance(head, Decline) else RecordedModel(adapter, program, head, no_micro)


def _prefer_generic(
    adapter: ModelAdapter | Decline | None, model: VllmModel, rank: RankContext
) -> ModelAdapter | Decline | None:
    """Return the generic adapter if the user requested it and no adapter is registered for this architecture.

    An adapter for the backbone is preferred, unless it does not know the model's parts.
    """
    if not rank.config.generic or isinstance(adapter, Decline):
        return adapter
    if adapter is not None:
        known = get_adapter(rank.vllm_config.model_config.architecture) is not None
        if known or call_adapter(adapter, partial(adapter.decline, model)) is None:
            return adapter
    return GenericAdapter(rank.groups.tensor_parallel, rank.vllm_config, rank.stage)


def _check_backbone(adapter: ModelAdapter, model: VllmModel, rank: RankContext) -> Decline | None:
    """Decline a model that is a decoder itself, if the adapter is for its backbone. EmbeddingGemma is such a model."""
    if isinstance(adapter, GenericAdapter) or get_adapter(rank.vllm_config.model_config.architecture) is not None:
        return None
    holds = hasattr(model, "model") or hasattr(model, "language_model")
    return None if holds else Decline("its parts are not known", type(model).__name__)


def _check_stage(stage: Stage) -> Decline | None:
    if stage.count > 1 and not stage.layers:
        return Decline("a stage of the pipeline has no layers", f"stage {stage.number} of {stage.count}")
    return None
