"""A decoder of the shape of DeepSeek's dense layers over ranks: an all-reduce after attention and after the MLP.

Each rank has part of the heads and of the MLP's width. Attention is causal and keeps a cache that the next micro-batch
reads, so both the order of micro-batches and their positions count.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dbo_runtime.devices.npu import NpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.validate import validate

LAYERS = 3
TOKENS = 24
HIDDEN = 32
NAMES = ("query", "key", "value", "out", "up", "down")
SLOW = 0.03  # seconds more for each all-reduce: many times what the host takes to issue the other micro-batch


class Layer:
    """This rank's part of a layer."""

    def __init__(self, rank: int, ranks: int, seed: int, group: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        part = slice(rank * HIDDEN // ranks, (rank + 1) * HIDDEN // ranks)
        for name in NAMES:
            weight = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
            setattr(self, name, (weight[part] if name in ("out", "down") else weight[:, part]).contiguous().npu())
        self._group = group
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def forget(self) -> None:
        """Empty the cache."""
        self._keys, self._values = [], []

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed, new residual) [tokens, hidden], the latter in the memory of the former one."""
        residual.add_(x)
        return residual * torch.rsqrt((residual * residual).mean(-1, keepdim=True) + 1e-6), residual

    def attention(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum [tokens, hidden]."""
        self._keys.append(x @ self.key)
        self._values.append(x @ self.value)
        keys, values = torch.cat(self._keys), torch.cat(self._values)
        scores = (x @ self.query) @ keys.t()
        later = torch.arange(keys.shape[0], device="npu")[None, :] > positions[:, None]
        return torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ values @ self.out

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum [tokens, hidden]."""
        return torch.nn.functional.silu(x @ self.up) @ self.down

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(partial, group=self._group)
        return partial


def record(layers: list[Layer]) -> Program:
    """Declare one micro-batch."""
    p = ProgramBuilder()
    x, residual, positions = p.input("x"), p.input("residual"), p.input("positions")
    for index, layer in enumerate(layers):
        with p.layer(index):
            x, residual = p.compute("attn_norm", layer.add_norm, x, residual, overwrites=(residual,), outputs=2)
            x = p.compute("attention", layer.attention, positions, x, ordered=True)
            x = p.comm("attn_reduce", layer.all_reduce, x, overwrites=(x,), communicator="tensor")
            x, residual = p.compute("mlp_norm", layer.add_norm, x, residual, overwrites=(residual,), outputs=2)
            x = p.compute("mlp", layer.mlp, x)
            x = p.comm("mlp_reduce", layer.all_reduce, x, overwrites=(x,), communicator="tensor")
    return p.build(x, residual)


def make_inputs(*bounds: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the inputs of micro-batches that end at these tokens."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(99))
    pieces = [slice(start, end) for start, end in zip((0, *bounds), (*bounds, TOKENS), strict=True)]
    return [(x[piece].npu(), x[piece].npu(), torch.arange(TOKENS)[piece].npu()) for piece in pieces]


def compare_split_and_unsplit(rank: Any) -> dict[str, Any]:
    """Return the relative error of split results at each cut, and what was concurrent to the all-reduces."""
    from tests.standin.cann import cann

    standin = cann.load()
    group = dist.new_group(backend="hccl")
    layers = [Layer(rank.number, rank.size, seed, group) for seed in range(LAYERS)]
    program = record(layers)
    expected = run_unsplit(program, layers)
    device = NpuDevice(groups=[group])
    schedule = lower([program] * 2, alternate([program] * 2))
    validate(schedule)
    executor = Executor(schedule, device, EventTable(device))
    errors = {cut: compute_relative_error(run_split(executor, layers, cut), expected) for cut in range(1, TOKENS)}
    standin.delay("HcclAllReduce", SLOW)
    with standin.trace() as unsplit:
        run_unsplit(program, layers)
    with standin.trace() as split:
        run_split(executor, layers, TOKENS // 2)
    standin.calm()
    lanes = [lane.stream.stream_id for lane in device.open_lanes(schedule.lanes)]
    return {
        "relative_error": errors,
        "concurrent": {"unsplit": list_concurrent(unsplit), "split": list_concurrent(split)},
        "lanes": lanes,
        "collectives": sorted(device.list_reserved()),
    }


def find_streams_of_collectives(rank: Any) -> list[int]:
    """Return on which stream a new group's collectives run: before the first, after others drew some, and after it."""
    group = dist.new_group(backend="hccl")
    device = NpuDevice(groups=[group])
    found = [*device.list_reserved()]
    drawn = [device.backend.Stream().stream_id for _ in range(5)]
    found += device.list_reserved()
    dist.all_reduce(torch.ones(4, device="npu"), group=group)
    found += device.list_reserved()
    assert not set(found) & set(drawn)
    return found


def run_unsplit(program: Program, layers: list[Layer]) -> list[torch.Tensor]:
    """Run all tokens as one micro-batch, without a device."""
    for layer in layers:
        layer.forget()
    (outputs,) = run_sequential([program], make_inputs())
    return [tensor.cpu() for tensor in outputs]


def run_split(executor: Executor, layers: list[Layer], cut: int) -> list[torch.Tensor]:
    """Run two micro-batches, overlapped."""
    for layer in layers:
        layer.forget()
    parts = executor.run(make_inputs(cut))
    return [torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)]


def compute_relative_error(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(one, other, strict=True))


def list_concurrent(kernels: Any) -> list[str]:
    """Return the kernels that ran while another stream was in an all-reduce."""
    kernels = [kernel for kernel in kernels if not kernel.name.startswith("Event")]
    reduces = [kernel for kernel in kernels if kernel.name == "HcclAllReduce"]
    assert len(reduces) >= 2 * LAYERS
    return sorted(
        {
            kernel.name
            for kernel in kernels
            for reduce in reduces
            if kernel.stream != reduce.stream and kernel.start < reduce.end and reduce.start < kernel.end
        }
    )
