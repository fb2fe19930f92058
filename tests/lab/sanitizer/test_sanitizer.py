"""What the sanitizer sees of ops that do more to memory than they declare, and of what is not ordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.errors import SanitizerError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import LATEST_FIRST, alternate, get_policy, latest_first, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Issue, Schedule
from dbo_runtime.lab.sanitizer.executor import SanitizedExecutor
from dbo_runtime.lab.sanitizer.memory import poison, share_memory


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def record(norm: Callable[..., Any] = lambda x: (x * 2, x + 1), **declaration: Any) -> Program:
    """Return `x -> norm -> reduce (on comm) -> add`, with a residual that the reduce does not touch."""
    p = ProgramBuilder()
    x = p.input("x")
    normed, residual = p.compute("norm", norm, x, outputs=2, **declaration)
    reduced = p.comm("reduce", lambda x: x.mul_(3), normed, overwrites=(normed,))
    return p.build(p.compute("add", torch.add, reduced, residual))


def lower_two(program: Program) -> Schedule:
    return lower([program] * 2, alternate([program] * 2))


def run(device: CpuDevice, schedule: Schedule) -> Any:
    inputs = [(torch.arange(4.0),), (torch.arange(4.0, 8.0),)]
    return SanitizedExecutor(schedule, device, EventTable(device)).run(inputs)


def test_a_right_program_gives_the_results_of_the_sequential_loop(device: CpuDevice) -> None:
    program = record()
    expected = run_sequential([program] * 2, [(torch.arange(4.0),), (torch.arange(4.0, 8.0),)])
    for (result,), (other,) in zip(run(device, lower_two(program)), expected, strict=True):
        assert torch.equal(result, other)


KEPT = torch.zeros(4)
FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "writes": (lambda x: (x.mul_(2), x + 1), "its result %1:norm has memory of %0:x, which it declares only to read"),
    "changes": (lambda x: (x * 2, x.add_(1).clone()), "it changed %0:x, which it declares only to read"),
    "returns a view": (lambda x: (x * 2, x[:]), "its result %2:norm has memory of %0:x"),
    "returns twice": (lambda x: (x * 2,) * 2, "its results %1:norm and %2:norm share memory"),
    "reuses memory": (
        lambda x: (x * 2, KEPT.copy_(x)),
        "has memory of %2:norm of micro-batch 0, which is still in use",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_op_that_does_to_memory_what_it_does_not_declare_is_named(device: CpuDevice, fault: str) -> None:
    function, said = FAULTS[fault]
    with pytest.raises(SanitizerError, match=said) as raised:
        run(device, lower_two(record(function)))
    assert str(raised.value).startswith("op 'norm', outside any layer, micro-batch ")
    assert f"declared at {__file__}:" in str(raised.value)


def test_an_op_may_overwrite_what_it_declares_to(device: CpuDevice) -> None:
    p = ProgramBuilder()
    x = p.compute("copy", torch.clone, p.input("x"))
    program = p.build(p.compute("double", lambda x: x.mul_(2), x, overwrites=(x,)))
    assert [float(result.sum()) for (result,) in run(device, lower_two(program))] == [12.0, 44.0]


def test_columns_of_one_tensor_do_not_share_memory() -> None:
    whole = torch.zeros(4, 6)
    left, right = whole.split([2, 4], dim=1)
    assert not share_memory(left, right)
    assert share_memory(left, whole[:, 1:3])
    assert share_memory({"a": [whole]}, (right,))
    assert not share_memory(whole[:0], whole)


def test_memory_is_poisoned_only_where_nothing_else_holds_it() -> None:
    alone, held = [torch.zeros(4) + 1], torch.zeros(4)
    address = alone[0].data_ptr()
    keeper = alone[0].untyped_storage()
    poison([held])
    assert torch.equal(held, torch.zeros(4))  # its name here is a second reference
    poison(alone)
    assert alone[0].data_ptr() == address
    assert torch.equal(alone[0], torch.ones(4))  # the storage is held, too
    del keeper
    poison(alone)
    assert bool(alone[0].isnan().all())
    poison([torch.arange(4)])  # indices stay as they are


def test_memory_that_is_used_after_it_was_freed_is_not_a_number(device: CpuDevice) -> None:
    """The memory is NumPy's, so that it can be looked at: torch does not know that it is used by another."""
    memory, seen = np.zeros(4, np.float32), []

    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(memory).copy_(x * 2)

    def peek(total: torch.Tensor) -> torch.Tensor:
        seen.append(memory.copy())
        return total + 1

    p = ProgramBuilder()
    total = p.compute("total", torch.sum, p.compute("double", double, p.input("x")))
    program = p.build(p.compute("peek", peek, p.compute("last", torch.neg, total)))
    schedule = lower([program], sequential([program]))
    ((result,),) = SanitizedExecutor(schedule, device, EventTable(device)).run([(torch.ones(4),)])
    assert float(result) == -7
    assert np.isnan(seen).all()


def test_a_collective_out_of_the_agreed_order_is_stopped_before_it_meets_others(device: CpuDevice) -> None:
    ran: list[float] = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        ran.append(float(x.sum()))
        return x.clone()

    p = ProgramBuilder()
    program = p.build(p.comm("reduce", reduce, p.compute("norm", torch.neg, p.input("x"))))
    agreed = lower_two(program)
    executor = SanitizedExecutor(agreed, device, EventTable(device))
    other = lower([program] * 2, [Issue(1, 0), Issue(1, 1), Issue(0, 0), Issue(0, 1)])
    tasks = {task.instruction.issue: entry for entry in executor._instructions for task in [entry[3]]}
    executor._instructions = [tasks[instruction.issue] for instruction in other.instructions]
    with pytest.raises(
        SanitizerError, match="number 0 of communicator 'comm', for which ranks agreed on reduce"
    ) as raised:
        executor.run([(torch.zeros(1),), (torch.ones(1),)])
    assert "micro-batch 1" in str(raised.value)
    assert ran == []


def test_the_last_micro_batch_is_issued_first_as_far_as_ordered_ops_allow() -> None:
    p = ProgramBuilder()
    x = p.compute("norm", abs, p.input("x"))
    x = p.compute("attention", abs, x, ordered=True)
    program = p.build(p.compute("mlp", abs, x))
    order = latest_first([program] * 3)
    assert order == get_policy(LATEST_FIRST, 0)([program] * 3)
    assert [tuple(issue) for issue in order] == [
        (2, 0), (1, 0), (0, 0), (0, 1), (1, 1), (2, 1), (2, 2), (1, 2), (0, 2),
    ]  # fmt: skip
    free = replace(program, ops=tuple(replace(op, ordered=False) for op in program.ops))
    assert [issue.micro_batch for issue in latest_first([free] * 3)] == [2] * 3 + [1] * 3 + [0] * 3
