"""Compile the functions of ops one by one, so that a split step loses less to an unsplit step that vLLM compiled.

vLLM compiles a model's forward as a whole, which a split step cannot use. This module compiles parts of the same
forward (norms, attention, a dense MLP) separately, for any number of tokens and, like vLLM, without guards: a compiled
function is never compiled again. Each call therefore checks whether its arguments fit; if not, the function runs eager.
The attention kernel stays an opaque op that reads the forward context when it runs, as in vLLM's graph. A reduce is
left out of the graph, as it is left out of the op.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode
from vllm.forward_context import set_forward_context

from dbo_runtime.adapters.contract import INPUT_IDS, POSITIONS, X
from dbo_runtime.decline import Decline
from dbo_runtime.errors import DboError, SplitError
from dbo_runtime.ir.op import COMPUTE, SIDE, Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.parallel.joint_work import JointWork
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.differences import compare_results

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

COMPILED_OPS = frozenset({"attn_norm", "attention", "mlp_norm", "mlp", "final_norm"})
"""Names of ops, as declared by `dbo_models.layers`. No experts: they count layers in the forward context."""

MIN_TOKENS = 2  # torch treats a size of 1 as a constant
EXAMPLE_TOKENS = 61  # tokens to compile with: a prime, so that it equals no size of a model
VERIFIED_TOKENS = (EXAMPLE_TOKENS, 16, MIN_TOKENS)  # token counts for comparing compiled and eager

_EAGER = "ops of split steps run eager, though DBO_COMPILE=1"


class CompiledFunction:
    """An op's function, with its compiled form if there is one.

    Args:
        fn: the eager function.
        max_tokens: largest number of tokens for which the compiled form is used.

    Attributes:
        fn: the eager function.
    """

    def __init__(self, fn: Callable[..., Any], max_tokens: int) -> None:
        self.fn = fn
        self._max_tokens = max_tokens
        self._compiled: Callable[..., Any] | None = None
        self._signature: list[tuple[torch.dtype, list[int]]] = []

    @property
    def is_compiled(self) -> bool:
        """Whether there is a compiled form."""
        return self._compiled is not None

    def __call__(self, *given: torch.Tensor) -> Any:
        """Run the compiled form if it fits the tensors ([tokens, hidden] or [..., tokens]), otherwise `fn`."""
        return self.fn(*given) if self._compiled is None or not self.fits(given) else self._compiled(*given)

    def fits(self, given: tuple[torch.Tensor, ...]) -> bool:
        """Return whether the compiled form, which has no guards, may be called with these tensors."""
        tokens = given[-1].shape[0]
        return MIN_TOKENS <= tokens <= self._max_tokens and all(
            tensor.is_contiguous()
            and tensor.dtype is dtype
            and [*tensor.shape] == [tokens if size == EXAMPLE_TOKENS else size for size in sizes]
            for tensor, (dtype, sizes) in zip(given, self._signature, strict=True)
        )

    def use(self, compiled: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> None:
        """Run *compiled* from now on. It was compiled with *given*, of `EXAMPLE_TOKENS` tokens."""
        self._compiled, self._signature = compiled, [(tensor.dtype, [*tensor.shape]) for tensor in given]

    def drop(self) -> None:
        """Run eager again."""
        self._compiled = None


class OpCompiler:
    """Compiles the functions of a program's ops, before serving.

    Args:
        vllm_config: vLLM's configuration of the model.
        collectives: the collectives that the program was recorded with.
        log: logger; reports once how many ops are compiled, and why others are not.
        group: vLLM's coordinator of all ranks that run the program together.
        add_inputs: `take_inputs` of an `InputAdapter`, applied to hidden states [tokens, hidden]; None without one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        collectives: ModelCollectives,
        log: FilteringBoundLogger,
        group: GroupCoordinator,
        add_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._collectives = collectives
        self._log = log
        self._work = JointWork(group)
        self._add_inputs = add_inputs

    def wrap(self, program: Program) -> Program:
        """Return *program* with functions that `compile` can compile. Unchanged if compilation is declined."""
        decline = check_compilation(self._vllm_config, program)
        if decline is not None:
            self._log.warning(_EAGER, reason=str(decline))
            return program
        max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        ops = [replace(op, fn=CompiledFunction(op.fn, max_tokens)) if _may_compile(op) else op for op in program.ops]
        return replace(program, ops=tuple(ops))

    @torch.inference_mode()
    def compile(self, program: Program) -> int:
        """Compile the functions prepared by `wrap`; return how many were compiled. Takes seconds per layer. Collective.

        A function stays eager if it cannot be compiled on every rank, or its results differ. The log has the first
        reason. If anything else fails on any rank, all functions stay eager on all ranks.
        """
        functions = [op.fn for op in program.ops if isinstance(op.fn, CompiledFunction)]
        if not functions:
            return 0
        start, reasons = time.perf_counter(), list[str]()
        try:
            with self._work.guard():
                for tokens in VERIFIED_TOKENS:
                    self._pass_through(program, tokens, reasons)
                self._work.gather()  # an op may have failed on another rank since the last meeting
        except DboError as error:
            for function in functions:
                function.drop()
            self._log.warning(_EAGER, reason=_get_first_line(error))
            return 0
        done = sum(function.is_compiled for function in functions)
        self._log.info("ops of split steps are compiled", ops=done, seconds=f"{time.perf_counter() - start:.0f}")
        if reasons:
            self._log.warning("some ops of split steps run eager", ops=len(functions) - done, reason=reasons[0])
        return done

    def _pass_through(self, program: Program, tokens: int, reasons: list[str]) -> None:
        """Run a program with *tokens* random tokens. Compile each function, and compare it with the eager one.

        Ranks meet before each op, because it may communicate.
        """
        inputs = self._make_inputs(program, tokens)
        values: dict[Value, Any] = {value: inputs[value.name] for value in program.inputs}
        with set_forward_context(None, self._vllm_config, num_tokens=tokens, skip_compiled=True):
            for op in program.ops:
                given = tuple(values[value] for value in op.reads)
                self._work.gather()
                if isinstance(op.fn, CompiledFunction):
                    if tokens == EXAMPLE_TOKENS:
                        self._try(op, partial(self._compile_op, op, given), reasons)
                    if op.fn.is_compiled:
                        self._try(op, partial(self._compare, op, given), reasons)
                result = (op.fn.fn if isinstance(op.fn, CompiledFunction) else op.fn)(*given)
                if op.ordered:  # without requests attention is skipped, and its result is uninitialized memory
                    result = torch.randn(result.shape, dtype=result.dtype)
                values.update(zip(op.writes, (result,) if len(op.writes) == 1 else result, strict=True))

    def _try(self, op: Op, action: Callable[[], None], reasons: list[str]) -> None:
        """Apply *action* to an op's function. Run the function eager if that fails on any rank."""
        function: Any = op.fn
        problem = ""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever torch raises, the eager function still works
            problem = f"{op.label}: {type(error).__name__}: {_get_first_line(error)}"
        problems = [problem for problem in self._work.gather(problem) if problem]
        if problems:
            function.drop()
            reasons.append(problems[0])

    def _compile_op(self, op: Op, given: tuple[torch.Tensor, ...]) -> None:
        function: Any = op.fn
        function.use(self._compile(function.fn, _copy(given)), given)

    def _compare(self, op: Op, given: tuple[torch.Tensor, ...]) -> None:
        function: Any = op.fn
        if not function.fits(given):
            raise SplitError(f"{op.label}: its arguments differ in type or shape from those that it was compiled with.")
        results, eager_results = function(*_copy(given)), function.fn(*_copy(given))
        for actual, expected in zip(_list(results), _list(eager_results), strict=True):
            if op.ordered and actual.shape == expected.shape and actual.dtype == expected.dtype:
                continue  # uninitialized values: attention is skipped here
            compare_results(op.label, actual, expected, "an op compiled and eager", "DBO_COMPILE=0 compiles none")

    def _compile(self, fn: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """Compile a function for any number of tokens."""
        reducing = self._collectives.get_reducing_module(fn)
        traced = fn if reducing is None else reducing

        def call(*arguments: Any) -> Any:
            return traced(*arguments)

        for tensor in given:
            for dimension, size in enumerate(tensor.shape):
                if size == EXAMPLE_TOKENS:
                    torch._dynamo.mark_dynamic(tensor, dimension)
        options = {
            **self._vllm_config.compilation_config.inductor_compile_config,
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        }
        without = nullcontext() if reducing is None else self._collectives.without_reduces()
        with torch._dynamo.config.patch(enable_aot_compile=True), without:
            wrapped: Any = torch.compile(call, fullgraph=True, dynamic=False, backend="inductor", options=options)
            compiled = wrapped.aot_compile((given, {}))
        compiled.disable_guard_check()  # `fits` checks what guards would check
        run: Callable[..., Any] = compiled
        return run

    def _make_inputs(self, program: Program, tokens: int) -> dict[str, torch.Tensor]:
        """Return a program's inputs by name: hidden states, positions, and the tensors of the previous stage."""
        config = self._vllm_config.model_config
        generator = torch.Generator().manual_seed(0)
        inputs = {
            value.name: torch.randn(tokens, config.get_hidden_size(), generator=generator).to(config.dtype)
            for value in program.inputs
        }
        if self._add_inputs is not None:
            inputs[X] = self._add_inputs(inputs[X])
        positions = torch.arange(tokens)
        rows = positions.expand(3, -1).contiguous() if config.uses_mrope else positions
        return {**inputs, POSITIONS: rows, INPUT_IDS: (positions % config.get_vocab_size()).to(torch.int32)}


def check_compilation(vllm_config: VllmConfig, program: Program) -> Decline | None:
    """Decline compilation unless vLLM compiles, too, and the case has been measured."""
    if not get_platform().compiles_ops:
        return Decline("compilation is proven on CPU only")
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    if compilation.mode == CompilationMode.NONE or compilation.backend != "inductor":
        return Decline("vLLM compiles nothing either (enforce_eager)")
    if parallel.data_parallel_size > 1:
        return Decline("not supported yet: data parallel")
    if SIDE in program.lanes:
        return Decline("not supported yet: concurrent ops (DBO_SIDE=on)")
    return None


def _may_compile(op: Op) -> bool:
    return op.lane == COMPUTE and op.name in COMPILED_OPS


def _get_first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _copy(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in given)  # an op may overwrite its arguments


def _list(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
