"""Mistakes of adapters: each makes of a right program of a Llama-like model one that has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dbo_runtime.ir.op import COMM, COMPUTE, Op
from dbo_runtime.ir.program import Program

Fault = Callable[[Program], Program]
SMALL = 0.01


def edit(program: Program, name: str, change: Callable[[Op], Op], layers: int | None = None) -> Program:
    """Return the program with the ops of a name changed, of the first *layers* layers only if that is given."""
    changed = [
        change(op) if op.name == name and (layers is None or (op.layer or 0) < layers) else op for op in program.ops
    ]
    assert changed != list(program.ops), f"there is no op {name}"
    return replace(program, ops=tuple(changed))


def wrap(name: str, after: Callable[..., Any], layers: int | None = None) -> Fault:
    """Return a fault: ops of this name return what *after* makes of their function and what they read."""

    def plant(program: Program) -> Program:
        def change(op: Op) -> Op:
            return replace(op, fn=lambda *reads, fn=op.fn: after(fn, *reads))

        return edit(program, name, change, layers)

    return plant


def leave_out_ordered(program: Program) -> Program:
    """Attention that is not `ordered`, though it writes the KV cache that later micro-batches read."""
    return edit(program, "attention", lambda op: replace(op, ordered=False))


def change_residual_in_place(program: Program) -> Program:
    """An MLP that also adds to its input."""
    return wrap("mlp", _run_and_scale_input)(program)


def change_attention_input_in_place(program: Program) -> Program:
    """An attention that also adds to its input."""
    return wrap("attention", _run_and_scale_last)(program)


def leave_out_overwrites_of_reduce(program: Program) -> Program:
    """A reduce in place that does not say so."""
    return edit(program, "attn_reduce", lambda op: replace(op, overwrites=()))


def leave_out_overwrites_of_norm(program: Program) -> Program:
    """A norm that adds the residual in place and does not say so."""
    program = edit(program, "mlp_norm", lambda op: replace(op, overwrites=()))
    return wrap("mlp_norm", _add_in_place)(program)


def norm_on_comm(program: Program) -> Program:
    """A norm on the lane that communicates."""
    return edit(program, "mlp_norm", lambda op: replace(op, lane=COMM, communicator=COMM))


def attention_on_comm(program: Program) -> Program:
    """Attention on the lane that communicates, where the forward context may be another micro-batch's."""
    return edit(program, "attention", lambda op: replace(op, lane=COMM, communicator=COMM))


def leave_out_reduce(program: Program) -> Program:
    """An all-reduce that returns its part."""
    return wrap("attn_reduce", lambda fn, x: x)(program)


def reduce_twice(program: Program) -> Program:
    """An all-reduce of what is reduced already."""
    return wrap("mlp_reduce", lambda fn, x: fn(fn(x)))(program)


def reduce_on_compute(program: Program) -> Program:
    """An all-reduce that is declared as computation, and so shares no communicator's order."""
    return edit(program, "attn_reduce", lambda op: replace(op, lane=COMPUTE, communicator=None))


def reduce_inside_mlp(program: Program) -> Program:
    """An MLP that still has its all-reduce, before the one that is declared."""
    reduce = next(op.fn for op in program.ops if op.name == "mlp_reduce")
    return wrap("mlp", lambda fn, x: reduce(fn(x)))(program)


def norm_before_reduce(program: Program) -> Program:
    """Norm and reduce in the wrong order."""
    return wrap("attn_reduce", lambda fn, x: fn(x / x.norm(dim=-1, keepdim=True)))(program)


def smuggle_value(program: Program) -> Program:
    """A value that goes from one op to a later one past the program."""
    kept: list[torch.Tensor] = []

    def keep(fn: Callable[..., Any], *reads: Any) -> Any:
        kept[:] = [reads[0].clone()]
        return fn(*reads)

    def use(fn: Callable[..., Any], x: torch.Tensor) -> Any:
        return fn(x) + SMALL * kept[0].sum()

    return wrap("mlp", use)(wrap("attn_norm", keep)(program))


def use_after_free(program: Program) -> Program:
    """A reference to a value that an op keeps, and reads when the program has freed it."""
    kept: list[torch.Tensor] = []

    def keep(fn: Callable[..., Any], positions: Any, x: torch.Tensor) -> Any:
        kept[:] = [x]
        return fn(positions, x)

    def use(fn: Callable[..., Any], x: torch.Tensor) -> Any:
        return fn(x) + SMALL * kept[0].sum()

    return wrap("mlp", use)(wrap("attention", keep)(program))


def return_input(program: Program) -> Program:
    """An op that returns its own input, which it declares only to read."""
    return edit(wrap("attn_norm", lambda fn, *reads: (fn(*reads)[0], reads[-1]))(program), "attn_norm", _overwrite_none)


def return_view(program: Program) -> Program:
    """An op that returns a view of what it only reads, where the right one returns new memory."""
    return wrap("mlp", lambda fn, x: x.view_as(fn(x)))(program)


def return_shared_results(program: Program) -> Program:
    """Two results of one op in the same memory."""
    return wrap("mlp_norm", lambda fn, *reads: (fn(*reads)[0],) * 2)(program)


def reuse_buffer(program: Program) -> Program:
    """An op that returns one buffer again and again, in which the other micro-batch still has its result."""
    buffers: dict[int, torch.Tensor] = {}

    def run(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        result = fn(x)
        buffer = buffers.setdefault(result.shape[-1], torch.empty(2048, result.shape[-1], dtype=result.dtype))
        return buffer[: len(result)].copy_(result)

    return wrap("mlp", run)(program)


def depend_on_size(program: Program) -> Program:
    """An op whose result depends on how many tokens its micro-batch has."""
    return wrap("mlp", lambda fn, x: fn(x) * (1 + SMALL * len(x)))(program)


def depend_on_token_before(program: Program) -> Program:
    """An op that mixes each token with the one before it, which may be in another micro-batch."""
    return wrap("mlp", lambda fn, x: fn(x) + SMALL * x.roll(1, 0))(program)


def miss_last_token(program: Program) -> Program:
    """An op that computes nothing for the last token."""

    def run(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = fn(x)
        result[-1] = 0
        return result

    return wrap("mlp", run)(program)


def use_first_positions(program: Program) -> Program:
    """Attention at positions from zero on, whatever micro-batch it is of."""

    def run(fn: Callable[..., Any], positions: torch.Tensor, x: torch.Tensor) -> Any:
        return fn(torch.arange(len(positions)).to(positions), x)

    return wrap("attention", run)(program)


def use_other_layer(program: Program) -> Program:
    """The MLP of the first layer in all layers."""
    first = next(op.fn for op in program.ops if op.name == "mlp")
    return edit(program, "mlp", lambda op: replace(op, fn=first))


def draw_noise(program: Program) -> Program:
    """An op that adds noise."""
    return wrap("mlp", lambda fn, x: fn(x) * (1 + SMALL * torch.randn_like(x)))(program)


def count_calls(program: Program) -> Program:
    """An op that depends on how often it was called."""
    calls = itertools.count()
    return wrap("mlp", lambda fn, x: fn(x) * (1 + SMALL * next(calls)))(program)


def round_result(program: Program) -> Program:
    """An op that computes in half the precision."""
    return wrap("mlp", lambda fn, x: fn(x).bfloat16().float())(program)


def return_too_few(program: Program) -> Program:
    """An op that returns one value where it declares two."""
    return wrap("mlp_norm", lambda fn, *reads: fn(*reads)[0])(program)


def raise_error(program: Program) -> Program:
    """An op that raises."""

    def run(fn: Callable[..., Any], x: torch.Tensor) -> Any:
        raise RuntimeError("no such kernel")

    return wrap("mlp", run)(program)


def leave_out_layer(program: Program) -> Program:
    """A program that leaves a layer's MLP out."""
    return wrap("mlp", lambda fn, x: torch.zeros_like(x), layers=1)(program)


ADAPTER_FAULTS: tuple[Fault, ...] = (
    leave_out_ordered,
    change_residual_in_place,
    change_attention_input_in_place,
    leave_out_overwrites_of_reduce,
    leave_out_overwrites_of_norm,
    norm_on_comm,
    attention_on_comm,
    leave_out_reduce,
    reduce_twice,
    reduce_on_compute,
    reduce_inside_mlp,
    norm_before_reduce,
    smuggle_value,
    use_after_free,
    return_input,
    return_view,
    return_shared_results,
    reuse_buffer,
    depend_on_size,
    depend_on_token_before,
    miss_last_token,
    use_first_positions,
    use_other_layer,
    draw_noise,
    count_calls,
    round_result,
    return_too_few,
    raise_error,
    leave_out_layer,
)


def _overwrite_none(op: Op) -> Op:
    return replace(op, overwrites=())


def _run_and_scale_input(fn: Callable[..., Any], x: torch.Tensor) -> Any:
    result = fn(x)
    x.mul_(1 + SMALL)
    return result


def _run_and_scale_last(fn: Callable[..., Any], *reads: Any) -> Any:
    result = fn(*reads)
    reads[-1].mul_(1 + SMALL)
    return result


def _add_in_place(fn: Callable[..., Any], x: torch.Tensor, residual: torch.Tensor) -> Any:
    normed, added = fn(x, residual)
    return normed, residual.copy_(added)
