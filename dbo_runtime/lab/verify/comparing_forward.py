"""Compare a model's own forward with its program, step by step, while vLLM runs the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm import forward_context

from dbo_runtime.adapters.contract import POSITIONS, X
from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import SplitError
from dbo_runtime.ir.divided_ops import divide_ops
from dbo_runtime.ir.nano_batches import SIZES, NanoProgram, cut_program
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.policies import latest_first
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.progress import show_progress
from dbo_runtime.lab.sanitizer.memory import copy_tensors, list_tensors
from dbo_runtime.lab.verify.results import find_first_mismatch, find_first_unmatched, listen
from dbo_runtime.lab.verify.stage_verification import StageVerification
from dbo_runtime.lab.verify.watched_run import Fault, WatchedRun, run_watched
from dbo_runtime.nano_sizes import slice_nano_batches
from dbo_runtime.vllm_plugin.api.forward_context import enter_context
from dbo_runtime.vllm_plugin.context.nano_contexts import make_nano_contexts
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.sequence import IntermediateTensors


class Mismatch(NamedTuple):
    """An op of a program with wrong results or undeclared effects.

    Attributes:
        op: label of the first op that differs, such as `L3.mlp`; in an unsplit program, the first op after the last one
            that agrees.
        declared_at: `file:line` of the op's declaration.
        cut: the token at which the step was cut; None if it was not cut.
        step: description of the step.
        relative_error: the largest difference, relative to the largest expected value.
        fault: the undeclared effect; empty if the results differ.
    """

    op: str
    declared_at: str
    cut: int | None
    step: str
    relative_error: float
    fault: str = ""

    def __str__(self) -> str:
        """Format as one line."""
        where = "unsplit" if self.cut is None else f"cut at token {self.cut}"
        if self.fault:
            return f"{self.step}, {where}: {self.op}: {self.fault} ({self.declared_at})"
        how = f"differs first, by {self.relative_error:.1e} of the largest value ({self.declared_at})"
        return f"{self.step}, {where}: {self.op} {how}"


@dataclass
class Verification:
    """The result of a verification.

    Attributes:
        program: the program that the adapter recorded.
        cuts: number of cuts that were compared.
        in_stages: whether the adapter was also verified as two stages of a pipeline.
        mismatches: the first mismatch of each step and cut; empty if the adapter is right.
    """

    program: Program
    cuts: int = 0
    in_stages: bool = False
    mismatches: list[Mismatch] = field(default_factory=list)

    def __str__(self) -> str:
        """Format as one line, or one line per mismatch."""
        if self.mismatches:
            return "\n".join(map(str, self.mismatches))
        how = f"unsplit{', in two stages' if self.in_stages else ''} and cut at {self.cuts} places"
        return f"equal to the model's own forward: {len(self.program.ops)} ops, {how}"


class ComparingForward:
    """Replaces a model's forward: runs it, then the program unsplit and at every cut, and notes mismatches.

    Args:
        program: the program of one micro-batch.
        stages: the programs of two stages; None if there are none.
        model: the model whose forward is replaced.
        splitter: splitter for the forward context.
        take_inputs: method of an `InputAdapter`; None without one.
        caches: the KV caches; vLLM adds them to this list once they are allocated.
    """

    def __init__(
        self,
        program: Program,
        stages: StageVerification | None,
        model: VllmModel,
        splitter: ContextSplitter,
        take_inputs: Callable[[torch.nn.Module, torch.Tensor, bool], torch.Tensor] | None,
        caches: list[Any],
    ) -> None:
        self.verification = Verification(program, in_stages=stages is not None)
        self._stages = stages
        self._caches = caches
        self._take_inputs = take_inputs
        self._model = model
        self._forward = model.forward
        self._splitter = splitter

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one step with the model's own forward, and compare the program with it."""
        x = self._model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        if self._take_inputs is not None:
            x = self._take_inputs(self._model, x, True)  # keep them, because the forward takes them, too
        expected: list[torch.Tensor] = []
        before = copy_tensors(self._caches)
        with listen(self._model, expected):
            hidden: torch.Tensor = self._forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        context = forward_context.get_forward_context() if forward_context.is_forward_context_available() else None
        if context is not None and context.attn_metadata:
            after = copy_tensors(self._caches)
            self._compare(context, x, positions, [*expected, hidden], before)
            self._restore(after)
        return hidden

    def _restore(self, copies: list[torch.Tensor]) -> None:
        """Write the copied contents back to the KV caches."""
        for cache, copy in zip(list_tensors(self._caches), copies, strict=True):
            cache.copy_(copy)

    def _compare(
        self,
        context: ForwardContext,
        x: torch.Tensor,
        positions: torch.Tensor,
        expected: list[torch.Tensor],
        before: list[torch.Tensor],
    ) -> None:
        batch = self._splitter.read_batch(context, x.shape[0])
        if isinstance(batch, Decline):
            raise DeclineError("vLLM's step cannot be split", str(batch))
        step = f"{'prefill' if batch.prefill_tokens else 'decode'} of {batch.tokens} tokens"
        program = self.verification.program
        self._restore(before)
        run = run_watched([program], [program.order_inputs({X: x.clone(), POSITIONS: positions})])
        self._note_faults(step, None, run.faults)
        unsplit = run.kept[0]
        self._note(step, None, find_first_unmatched(program, unsplit, expected))
        if self._stages is not None:
            self._restore(before)
            self._note(f"{step}, in two stages", None, self._stages.compare(program, unsplit, x, positions))
        for cut in show_progress(range(1, batch.tokens), f"comparing a {step}", "cut"):
            self._restore(before)
            parts = self._run_cut(context, batch, cut, x, positions)
            if parts is not None:
                self.verification.cuts += 1
                self._note_faults(step, cut, parts.faults)
                self._note(step, cut, find_first_mismatch(program, unsplit, parts.kept))
            if any(op.token_wise for op in program.ops):
                self._restore(before)
                nano, kept = self._run_nano_batches(context, cut, x, positions)
                faults = [Fault(replace(op, nano_batch=None), what) for op, what in nano.faults]
                self._note_faults(f"{step}, in nano-batches", cut, faults)
                self._note(f"{step}, in nano-batches", cut, find_first_mismatch(program, unsplit, kept))

    def _run_cut(
        self, context: ForwardContext, batch: Batch, cut: int, x: torch.Tensor, positions: torch.Tensor
    ) -> WatchedRun | None:
        """Return the run of both micro-batches; None if the batch cannot be cut there."""
        try:
            slices = slice_batch(batch, [cut])
        except SplitError:
            return None
        contexts = self._splitter.split(context, slices)
        if isinstance(contexts, Decline):
            raise DeclineError("vLLM's step cannot be split", str(contexts))
        program = self.verification.program
        given = {X: x.clone(), POSITIONS: positions}
        inputs = [program.cut_inputs(given, piece.tokens, piece.requests) for piece in slices]
        programs = [program] * len(slices)
        with forward_context.override_forward_context(contexts[0]):
            return run_watched(programs, inputs, latest_first(programs), lambda mb: enter_context(contexts[mb]))

    def _run_nano_batches(
        self, context: ForwardContext, cut: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[WatchedRun, list[dict[Value, Any]]]:
        """Run both nano-batches, the second first; return the run, and what each op wrote in each nano-batch."""
        sizes = [cut, len(x) - cut]
        nano = cut_program(divide_ops(self.verification.program), len(sizes), TENSOR_ROWS, latest_first)
        slices = slice_nano_batches(sizes)
        contexts = make_nano_contexts(context, slices, self._splitter.platform)
        given = {X: x.clone(), POSITIONS: positions, SIZES: sizes}
        tokens = [piece.tokens for piece in slices]
        inputs = nano.program.cut_inputs(given, slice(0, len(x)), slice(0, 1), tokens)
        with forward_context.override_forward_context(contexts[0]):
            run = run_watched([nano.program], [inputs], enter=lambda number: enter_context(contexts[number]))
        return run, [
            {value: _take_part(nano, run.kept[0], value, number, piece) for value in self._list_written()}
            for number, piece in enumerate(tokens)
        ]

    def _list_written(self) -> list[Value]:
        return [value for op in self.verification.program.ops for value in op.writes]

    def _note_faults(self, step: str, cut: int | None, faults: list[Fault]) -> None:
        """Note undeclared effects of ops. Each is noted only once, because it is the same at most cuts."""
        known = {(mismatch.op, mismatch.fault) for mismatch in self.verification.mismatches}
        for op, what in faults:
            if (op.label, what) not in known:
                known.add((op.label, what))
                self.verification.mismatches.append(Mismatch(op.label, op.declared_at, cut, step, 0.0, what))

    def _note(self, step: str, cut: int | None, mismatch: tuple[Op, float] | None) -> None:
        if mismatch is not None:
            op, error = mismatch
            self.verification.mismatches.append(Mismatch(op.label, op.declared_at, cut, step, error))


def _take_part(nano: NanoProgram, kept: dict[Value, Any], value: Value, number: int, tokens: slice) -> Any:
    """Return what was written of a value in a nano-batch. Values that joint ops pass to each other are cut here."""
    if value in nano.parts:
        return kept[nano.parts[value][number]]
    whole = kept[nano.wholes[value]]
    return whole[tokens] if isinstance(whole, torch.Tensor) else whole
