"""Run a plan: everything in a split step between its decision and its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from vllm import forward_context
from vllm.forward_context import ForwardContext, get_forward_context

from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.observe.timeline import Recorder
from dbo_runtime.vllm_plugin.api.forward_context import enter_context, guard_context
from dbo_runtime.vllm_plugin.context.layer_transfers import transfer_once
from dbo_runtime.vllm_plugin.context.lora_mapping import LoraMapping
from dbo_runtime.vllm_plugin.parallel.stage import Results
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.step.arguments import StepArguments
from dbo_runtime.vllm_plugin.step.model_ends import ModelEnds
from dbo_runtime.vllm_plugin.step.repetition import Repetition


class StepRunner:
    """Runs split steps of one model.

    Args:
        runtime: runs plans.
        ends: makes the program's inputs, and the forward's result from its outputs.
        platform: platform that vLLM serves on.
        lora: adapters of each token; None without LoRA.
    """

    def __init__(
        self, runtime: MicroBatchRuntime, ends: ModelEnds, platform: Platform, lora: LoraMapping | None = None
    ) -> None:
        self._runtime = runtime
        self._ends = ends
        self._platform = platform
        self._lora = lora

    def copy_for(self, runtime: MicroBatchRuntime) -> StepRunner:
        """Return a runner of the same model with another runtime."""
        return StepRunner(runtime, self._ends, self._platform, self._lora)

    def check(self, arguments: StepArguments) -> Decline | None:
        """Return why a step with these arguments cannot be split; None if it can."""
        unsupported = self._ends.check(arguments)
        if unsupported is None and self._lora is not None:
            unsupported = self._lora.check(arguments.tokens)
        return unsupported

    def list_received(self, tokens: int) -> list[torch.Tensor]:
        """Return the rows of the model's buffers that hold what the stage before has sent for *tokens* tokens."""
        return self._ends.list_received(tokens)

    def run(
        self,
        plan: ExecutionPlan,
        contexts: list[ForwardContext],
        arguments: StepArguments,
        repetition: Repetition | None = None,
        recorder: Recorder | None = None,
    ) -> Results:
        """Run a plan with the forward context of each micro-batch, and return the forward's result, for all tokens.

        Args:
            plan: plan of the step.
            contexts: forward context of each micro-batch, and then of each nano-batch.
            arguments: arguments of the forward.
            repetition: runs the step again later, for a comparison; None if nothing is compared.
            recorder: records the times of the ops; None if they are not recorded.
        """
        flashcomm = self._platform.find_flashcomm(get_forward_context())
        with nullcontext() if flashcomm is None else flashcomm.left_out(contexts):
            return self._run(plan, contexts, arguments, repetition, recorder)

    def finish(self, results: Results) -> Results:
        """Return of a split step's results what vLLM's runner takes from the forward."""
        flashcomm = self._platform.find_flashcomm(get_forward_context())
        return results if flashcomm is None else flashcomm.take_chunks(results)

    def _run(
        self,
        plan: ExecutionPlan,
        contexts: list[ForwardContext],
        arguments: StepArguments,
        repetition: Repetition | None,
        recorder: Recorder | None,
    ) -> Results:
        inputs = self._ends.enter(arguments, plan, repetition)
        if plan.executor.check_context is not None:
            contexts = [guard_context(context, plan.executor.check_context) for context in contexts]
        # Attention that is not cut calls a connector's hooks as in an unsplit step.
        is_hooked = self._runtime.keeps_layers and not plan.nano_batches
        hooks = transfer_once(get_forward_context(), contexts) if is_hooked else nullcontext()
        select_lora = nullcontext(None) if self._lora is None else self._lora.split((*plan.slices, *plan.nano_batches))
        # At the end, the step's own forward context is restored.
        with hooks, forward_context.override_forward_context(contexts[0]), select_lora as select:
            enter = partial(_enter, contexts) if select is None else partial(_enter_with_lora, contexts, select)
            outputs = self._runtime.run(plan, inputs, enter, recorder)
        return self._ends.leave(outputs, plan.parts, arguments.positions)


def _enter(contexts: list[ForwardContext], number: int) -> None:
    """Make a forward context the current one."""
    enter_context(contexts[number])


def _enter_with_lora(contexts: list[ForwardContext], select: Callable[[int], None], number: int) -> None:
    """Make a forward context, and the LoRA adapters of its tokens, the current ones."""
    enter_context(contexts[number])
    select(number)
