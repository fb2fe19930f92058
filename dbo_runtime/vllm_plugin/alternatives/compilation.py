"""Functions of ops, compiled one by one, so that a split step loses less beside a whole one that vLLM compiled.

vLLM compiles a model's forward as a whole, which a split step cannot use. What is compiled here are parts of that same
forward (norms, attention, a dense MLP), each alone, for any number of tokens, and without guards, as vLLM does it: a
function that is compiled never compiles again. So whether it fits what it is given is asked at each call, and what does
not fit runs eager. Attention itself stays what it is in vLLM's own graph: an op that is not looked into, and reads the
forward context whenever it runs. A reduce is left out of the graph, as it is left out of the op.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform

from dbo_runtime.adapter import POSITIONS
from dbo_runtime.errors import SplitError
from dbo_runtime.program import COMPUTE, SIDE, Op, Program, Value
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.step.comparison import compare_results

COMPILED = frozenset({"attn_norm", "attention", "mlp_norm", "mlp", "final_norm"})
"""Ops by name, as `dbo_models.layers` declares them. No experts: their ops count layers in the forward context."""

LEAST = 2  # tokens: torch takes a size of 1 for a constant
EXAMPLE = 61  # tokens to compile with: a prime, which no size of a model is
TRIED = (EXAMPLE, 16, LEAST)  # tokens with which what was compiled is compared with what it stands for


class CompiledFunction:
    """An op's function, and what it was compiled to once `compile` was called.

    Attributes:
        fn: the function as it was.
    """

    def __init__(self, fn: Callable[..., Any], most: int) -> None:
        self.fn = fn
        self._most = most
        self._compiled: Callable[..., Any] | None = None
        self._kinds: list[tuple[torch.dtype, list[int]]] = []

    @property
    def is_compiled(self) -> bool:
        """Whether there is anything compiled to run."""
        return self._compiled is not None

    def __call__(self, *given: torch.Tensor) -> Any:
        """Run what was compiled where it fits, tensors of [tokens, hidden] or [..., tokens], and `fn` otherwise."""
        return self.fn(*given) if self._compiled is None or not self.fits(given) else self._compiled(*given)

    def fits(self, given: tuple[torch.Tensor, ...]) -> bool:
        """Return whether what was compiled may be given these: nothing in it looks at them again."""
        tokens = given[-1].shape[0]
        return LEAST <= tokens <= self._most and all(
            tensor.is_contiguous()
            and tensor.dtype is dtype
            and [*tensor.shape] == [tokens if size == EXAMPLE else size for size in sizes]
            for tensor, (dtype, sizes) in zip(given, self._kinds, strict=True)
        )

    def take(self, compiled: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> None:
        """Run *compiled* from now on, which was compiled with *given*, of `EXAMPLE` tokens."""
        self._compiled, self._kinds = compiled, [(tensor.dtype, [*tensor.shape]) for tensor in given]

    def drop(self) -> None:
        """Run eager again."""
        self._compiled = None


class OpCompiler:
    """Compiles the functions of a program's ops, before serving.

    Args:
        vllm_config: of the model.
        collectives: with which the program was recorded.
        log: told once what was compiled, and why what was not is not.
    """

    def __init__(self, vllm_config: Any, collectives: ModelCollectives, log: Any) -> None:
        self._vllm_config = vllm_config
        self._collectives = collectives
        self._log = log

    def wrap(self, program: Program) -> Program:
        """Return *program* with functions that `compile` can compile; as it is where nothing is to be compiled."""
        refusal = check_compilation(self._vllm_config, program)
        if refusal is not None:
            self._log.warning("ops of split steps run eager, though DBO_COMPILE=1", reason=refusal)
            return program
        most = self._vllm_config.scheduler_config.max_num_batched_tokens
        ops = [replace(op, fn=CompiledFunction(op.fn, most)) if _may_compile(op) else op for op in program.ops]
        return replace(program, ops=tuple(ops))

    @torch.inference_mode()
    def compile(self, program: Program) -> int:
        """Compile what `wrap` prepared; return how many functions. Takes seconds a layer. Collective, as the ops are.

        One that cannot be compiled, or then gives something else, stays eager; the log has the first reason.
        """
        functions = [op.fn for op in program.ops if isinstance(op.fn, CompiledFunction)]
        if not functions:
            return 0
        start, reasons = time.perf_counter(), list[str]()
        for tokens in TRIED:
            self._pass_through(program, tokens, reasons)
        done = sum(function.is_compiled for function in functions)
        self._log.info("ops of split steps are compiled", ops=done, seconds=f"{time.perf_counter() - start:.0f}")
        if reasons:
            self._log.warning("some ops of split steps run eager", ops=len(functions) - done, reason=reasons[0])
        return done

    def _pass_through(self, program: Program, tokens: int, reasons: list[str]) -> None:
        """Run a program with so many made-up tokens; compile what is reached, compare what was compiled."""
        inputs = self._make_inputs(program, tokens)
        values: dict[Value, Any] = {value: inputs[value.name] for value in program.inputs}
        with set_forward_context(None, self._vllm_config, num_tokens=tokens, skip_compiled=True):
            for op in program.ops:
                given = tuple(values[value] for value in op.reads)
                if isinstance(op.fn, CompiledFunction) and (tokens == EXAMPLE or op.fn.is_compiled):
                    try:
                        self._try(op, given)
                    except Exception as error:  # noqa: BLE001 - whatever torch raises there, eager is right
                        op.fn.drop()
                        reasons.append(f"{op.label}: {type(error).__name__}: {_first_line(error)}")
                result = (op.fn.fn if isinstance(op.fn, CompiledFunction) else op.fn)(*given)
                if op.ordered:  # without requests attention is left out, and gives whatever was in memory
                    result = torch.randn(result.shape, dtype=result.dtype)
                values.update(zip(op.writes, (result,) if len(op.writes) == 1 else result, strict=True))

    def _try(self, op: Op, given: tuple[torch.Tensor, ...]) -> None:
        function: Any = op.fn
        if not function.is_compiled:
            function.take(self._compile(function.fn, _copy(given)), given)
        if not function.fits(given):
            raise SplitError("its arguments are not what others are")
        found, wanted = function(*_copy(given)), function.fn(*_copy(given))
        for one, other in zip(_list(found), _list(wanted), strict=True):
            if op.ordered and one.shape == other.shape and one.dtype == other.dtype:
                continue  # its values mean nothing here
            compare_results(op.label, one, other, "an op compiled and eager", "DBO_COMPILE=0 compiles none")

    def _compile(self, fn: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """Compile a function for any number of tokens."""
        reducing = self._collectives.get_reducing_module(fn)
        traced = fn if reducing is None else reducing

        def call(*arguments: Any) -> Any:
            return traced(*arguments)

        for tensor in given:
            for dimension, size in enumerate(tensor.shape):
                if size == EXAMPLE:
                    torch._dynamo.mark_dynamic(tensor, dimension)
        options = {
            **self._vllm_config.compilation_config.inductor_compile_config,
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        }
        without = nullcontext() if reducing is None else self._collectives.without_reduces()
        with torch._dynamo.config.patch(enable_aot_compile=True), without:
            wrapped: Any = torch.compile(call, fullgraph=True, dynamic=False, backend="inductor", options=options)
            compiled = wrapped.aot_compile((given, {}))
        compiled.disable_guard_check()  # what it was compiled for is asked by `fits`
        run: Callable[..., Any] = compiled
        return run

    def _make_inputs(self, program: Program, tokens: int) -> dict[str, torch.Tensor]:
        """Return what a program takes, by name: hidden states, positions, and what a stage of a pipeline is handed."""
        config = self._vllm_config.model_config
        generator = torch.Generator().manual_seed(0)
        names = [value.name for value in program.inputs if value.name != POSITIONS]
        inputs = {
            name: torch.randn(tokens, config.get_hidden_size(), generator=generator).to(config.dtype) for name in names
        }
        positions = torch.arange(tokens)
        rows = positions.expand(3, -1).contiguous() if config.uses_mrope else positions
        return {**inputs, POSITIONS: rows}


def check_compilation(vllm_config: Any, program: Program) -> str | None:
    """Return why nothing is compiled here, or None: only what vLLM compiles, too, and where it has been measured."""
    if not current_platform.is_cpu():
        return "not proven but on CPU"
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    if compilation.mode == CompilationMode.NONE or compilation.backend != "inductor":
        return "vLLM compiles nothing either (enforce_eager)"
    if parallel.data_parallel_size > 1:
        return "not supported yet: data parallel"
    if SIDE in program.lanes:
        return "not supported yet: ops beside each other (DBO_SIDE=on)"
    return None


def _may_compile(op: Op) -> bool:
    return op.lane == COMPUTE and op.name in COMPILED


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _copy(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in given)  # an op may overwrite what it reads


def _list(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
