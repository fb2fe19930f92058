"""The two ends of a program: its inputs, from a forward's arguments, and the forward's result, from its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dbo_runtime.adapters.contract import (
    INPUT_IDS,
    POSITIONS,
    ArgumentAdapter,
    InputAdapter,
    OutputAdapter,
    RepeatableAdapter,
    X,
)
from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.ir.nano_batches import SIZES
from dbo_runtime.ir.program import Program
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL, Results, Stage, take_inputs, take_kept
from dbo_runtime.vllm_plugin.step.arguments import StepArguments
from dbo_runtime.vllm_plugin.step.head import Head
from dbo_runtime.vllm_plugin.step.padding import drop_padding, pad_inputs
from dbo_runtime.vllm_plugin.step.repetition import Repetition

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


class ModelEnds:
    """Makes a program's inputs from vLLM's arguments, and the forward's result from the program's outputs.

    Args:
        model: top-level model.
        program: ops of one micro-batch.
        adapter: adapter that recorded the program. It may keep data for the next forward, or leave data for another
            model, or take further arguments; see `InputAdapter`, `RepeatableAdapter`, `OutputAdapter` and
            `ArgumentAdapter`.
        stage: pipeline stage of the model.
        head: runs on the hidden states of the backbone; None if the forward returns them.
    """

    def __init__(
        self, model: VllmModel, program: Program, adapter: Any, stage: Stage = WHOLE_MODEL, head: Head | None = None
    ) -> None:
        self._model = model
        self._program = program
        self._take_inputs = adapter.take_inputs if isinstance(adapter, InputAdapter) else None
        self._give_inputs = adapter.give_inputs if isinstance(adapter, RepeatableAdapter) else None
        self._take_arguments = adapter.take_arguments if isinstance(adapter, ArgumentAdapter) else None
        self._keep_output = adapter.keep_output if isinstance(adapter, OutputAdapter) else None
        self._stage = stage
        self._head = head
        self._takes_input_ids = any(value.name == INPUT_IDS for value in program.inputs)

    @property
    def may_repeat(self) -> bool:
        """Whether a step can run again: the model keeps no data for its next forward, or they can be given back."""
        return self._take_inputs is None or self._give_inputs is not None

    def list_received(self, tokens: int) -> list[torch.Tensor]:
        """Return the rows of the model's buffers that hold what the stage before has sent for *tokens* tokens."""
        return [buffer[:tokens] for buffer in self._stage.buffers.received.values()]

    def check(self, arguments: StepArguments) -> Decline | None:
        """Return why a program cannot take these arguments; None if it can."""
        tensors, tokens = arguments.intermediate_tensors, arguments.tokens
        taken = self._take_further(arguments)
        unsupported = taken if isinstance(taken, Decline) else self._stage.check_inputs(tensors, tokens)
        return unsupported or (arguments.check_input_ids() if self._takes_input_ids else None)

    def enter(
        self, arguments: StepArguments, plan: ExecutionPlan, repetition: Repetition | None
    ) -> list[tuple[Any, ...]]:
        """Return the inputs of each micro-batch of a plan [micro-batches][inputs]; see `Program.cut_inputs`.

        If there is a *repetition*, the model keeps its data for the next forward, and the repetition can give them
        back.
        """
        inputs = self._name_inputs(arguments if repetition is None else arguments.copy(), repetition)
        padded: dict[str, Any] = {**pad_inputs(self._program, inputs, plan.slices[-1].last_token)}
        if plan.nano_batches:
            padded[SIZES] = [piece.size for piece in plan.nano_batches]
        nano = [piece.tokens for piece in plan.nano_batches]
        programs = zip(plan.executor.schedule.programs, plan.slices, strict=True)
        return [program.cut_inputs(padded, each.tokens, each.requests, nano) for program, each in programs]

    def leave(
        self, outputs: Sequence[Sequence[torch.Tensor]], slices: Sequence[BatchSlice], positions: torch.Tensor
    ) -> Results:
        """Return the forward's result from the outputs of each part of the step [parts][outputs]."""
        results, kept = take_kept(self._program, drop_padding(outputs, slices, positions.shape[-1]))
        if self._keep_output is not None and kept:
            self._keep_output(self._model, kept)
        joined = self._stage.join(self._program, results)
        if self._head is None:
            return joined
        assert isinstance(joined, torch.Tensor), "models that score neither draft nor are in a pipeline"
        return self._head(joined, positions)

    def _take_further(self, arguments: StepArguments) -> dict[str, torch.Tensor] | Decline:
        """Return the program's inputs from further arguments, by name; or why it cannot take these arguments."""
        if self._take_arguments is not None:
            return self._take_arguments(self._model, arguments.further, arguments.tokens)
        return arguments.check_further() or {}

    def _name_inputs(self, arguments: StepArguments, repetition: Repetition | None) -> dict[str, torch.Tensor]:
        """Return the program's inputs: embedded tokens, or the tensors of the stage before; positions; token ids."""
        further = self._take_further(arguments)
        assert not isinstance(further, Decline), "checked before the decision"
        inputs = {POSITIONS: arguments.positions, **further}
        if self._takes_input_ids:
            assert arguments.input_ids is not None, "checked before the decision"
            inputs[INPUT_IDS] = arguments.input_ids
        if arguments.intermediate_tensors is not None:
            return {**take_inputs(self._program, arguments.intermediate_tensors), **inputs}
        embeds = arguments.inputs_embeds
        x = self._model.embed_input_ids(arguments.input_ids) if embeds is None else embeds
        if self._take_inputs is not None:
            x = self._take_inputs(self._model, x, repetition is not None)
            if repetition is not None and self._give_inputs is not None:
                repetition.give_back = partial(_give_back, partial(self._give_inputs, self._model), x.clone())
        return {X: x, **inputs}


def _give_back(give_inputs: Any, x: torch.Tensor, tokens: slice) -> None:
    give_inputs(x[tokens])
