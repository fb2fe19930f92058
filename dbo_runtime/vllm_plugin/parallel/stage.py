"""A stage of vLLM's pipeline: the layers on this rank, and the tensors that stages send each other.

vLLM's worker receives all tensors of a step before it calls the forward, and sends all of them after it returns. They
are therefore cut on entry and merged on exit. A forward could not send or receive those of a single micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from vllm.sequence import IntermediateTensors

from dbo_runtime.adapters.contract import ARGUMENT, INPUT_IDS, KEPT, POSITIONS, X
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.vllm_plugin.api.groups import get_pipeline_group, get_stage_layers
from dbo_runtime.vllm_plugin.parallel.agreement import gather
from dbo_runtime.vllm_plugin.platforms.platform import NO_BUFFERS, StageBuffers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import SupportsPP

Results: TypeAlias = torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]
"""The result of a forward: hidden states [tokens, hidden], with auxiliary ones if a drafter reads them; or the
tensors for the next stage of a pipeline."""

HIDDEN = "hidden_states"  # the name of hidden states between stages in every model family of vLLM


@dataclass(frozen=True, slots=True)
class Stage:
    """The pipeline stage that a rank serves; without a pipeline, the whole model.

    Attributes:
        number: number of the stage, from 0.
        count: number of stages.
        layers: the layers on this stage.
        handed: names of the tensors that each stage sends to the next one [tokens, hidden].
        auxiliary: names of the hidden states [tokens, hidden] that the last stage returns for a drafter, in order.
        buffers: buffers of the model whose rows are handed on as well, past the program.
    """

    number: int = 0
    count: int = 1
    layers: range = range(0)
    handed: tuple[str, ...] = (HIDDEN,)
    auxiliary: tuple[str, ...] = ()
    buffers: StageBuffers = NO_BUFFERS

    @property
    def name(self) -> str | None:
        """The name that vLLM's workers use, such as `pp0`; None without a pipeline."""
        return None if self.count == 1 else f"pp{self.number}"

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage returns normed hidden states."""
        return self.number == self.count - 1

    def describe(self) -> dict[str, int]:
        """Return the keys that identify this stage in a cost file; empty without a pipeline."""
        return {} if self.count == 1 else {"pipeline": self.count, "stage": self.number}

    def check_program(self, program: Program) -> Decline | None:
        """Decline a program that takes or returns other tensors than this stage; return None if it fits."""
        takes, gives = _name_inputs(program).keys(), {HIDDEN, *program.named} - {KEPT}
        missing = {*self.auxiliary} - gives
        if missing:
            return Decline("its adapter does not return the hidden states that the drafter reads", _list(missing))
        gives -= {*self.auxiliary}
        handed = {*self.handed}
        if takes == ({HIDDEN} if self.is_first else handed) and gives == ({HIDDEN} if self.is_last else handed):
            return None
        stage = f"on stage {self.number} of {self.count} its adapter takes {_list(takes)} and returns {_list(gives)}"
        return Decline("the program is not one of this pipeline", f"stages send {_list(handed)}; {stage}")

    def check_inputs(self, given: IntermediateTensors | None, tokens: int) -> Decline | None:
        """Decline a step of *tokens* tokens if the previous stage's tensors do not fit it; otherwise return None."""
        if given is None and self.is_first:
            return None
        sizes = {} if given is None else {name: tensor.shape[0] for name, tensor in given.tensors.items()}
        if sizes.keys() != (set() if self.is_first else {*self.handed, *self.buffers.received}):
            return Decline("unknown intermediate tensors", _list(sizes) or "none")
        if any(size != tokens for size in sizes.values()):
            return Decline("intermediate tensors of other tokens", f"{sizes}, {tokens} tokens")
        return None

    def join(self, program: Program, outputs: Sequence[Sequence[torch.Tensor]]) -> Results:
        """Return the forward's result, joined from the micro-batches' outputs [micro-batches][outputs]."""
        joined = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True)]
        if self.is_last:
            return (joined[0], joined[1:]) if self.auxiliary else joined[0]
        named = (name for name in program.named if name != KEPT)
        sent = {name: buffer[: joined[0].shape[0]] for name, buffer in self.buffers.sent.items()}
        return IntermediateTensors({**dict(zip((HIDDEN, *named), joined, strict=True)), **sent})


WHOLE_MODEL = Stage()


def take_kept(
    program: Program, outputs: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the micro-batches' outputs [micro-batches][outputs] without the `KEPT` output, and that output of each."""
    if KEPT not in program.named:
        return [[*each] for each in outputs], []
    number = 1 + program.named.index(KEPT)  # the result comes first
    return [[*each[:number], *each[number + 1 :]] for each in outputs], [each[number] for each in outputs]


def get_stage(model: SupportsPP, vllm_config: VllmConfig, buffers: StageBuffers = NO_BUFFERS) -> Stage:
    """Return the stage of a loaded model on this rank; *buffers* are those whose rows are handed on."""
    group = get_pipeline_group()
    if group.world_size == 1:
        return WHOLE_MODEL
    dtype, device = vllm_config.model_config.dtype, torch.device("cpu")
    empty = model.make_empty_intermediate_tensors(batch_size=1, dtype=dtype, device=device)
    layers = get_stage_layers(vllm_config, group.rank_in_group, group.world_size)
    handed = tuple(name for name in empty.tensors if name not in buffers.received)
    return Stage(group.rank_in_group, group.world_size, layers, handed, buffers=buffers)


def any_stage(own: bool) -> bool:
    """Return whether *own* is true on any stage of this rank's pipeline. Collective over the stages."""
    return any(gather(get_pipeline_group(), own))


def take_inputs(program: Program, given: IntermediateTensors) -> dict[str, torch.Tensor]:
    """Return the tensors sent by the previous stage, under the names of the program's inputs."""
    return {own: given.tensors[name] for name, own in _name_inputs(program).items()}


def name_results(result: Results, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Return a forward's result by name, cut to the first *tokens* tokens, because kernels need not compute padding."""
    if isinstance(result, IntermediateTensors):
        named = {**result.tensors}
    else:
        hidden, auxiliary = result if isinstance(result, tuple) else (result, [])
        named = {"hidden states": hidden, **{f"auxiliary hidden states {i}": one for i, one in enumerate(auxiliary)}}
    return {name: tensor[:tokens] for name, tensor in named.items()}


def copy_tensors(given: IntermediateTensors | None) -> IntermediateTensors | None:
    """Return copies that may be overwritten; None if nothing was sent."""
    if given is None:
        return None
    return IntermediateTensors({name: tensor.clone() for name, tensor in given.tensors.items()})


def _name_inputs(program: Program) -> dict[str, str]:
    """Return the tensors that a stage receives: vLLM's name of each -> the name of the program's input."""
    names = (value.name for value in program.inputs if value.name not in (INPUT_IDS, POSITIONS))
    names = (name for name in names if not name.startswith(ARGUMENT))
    return {HIDDEN if name == X else name: name for name in names}


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
