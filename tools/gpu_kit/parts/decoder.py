"""A decoder without vLLM, whose reduces are copies to the host and back: one GPU has no other to reduce with.

A copy takes a copy engine and the memory's bandwidth, and no multiprocessor; a collective of NCCL takes some. So what
is gained here is the most that could be.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dbo_runtime.devices import Device, open_device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.validate import validate
from dbo_runtime.observe.timeline import Recorder, Timeline

from ..machine import get_scale

MICRO_BATCHES = 2
REDUCES = 2  # of a layer


@dataclass(frozen=True)
class Size:
    """Of a decoder: tokens of a micro-batch, hidden size, layers."""

    tokens: int
    hidden: int
    layers: int


SIZES = {"chip": Size(4096, 4096, 8), "cpu": Size(64, 64, 2), "npu": Size(32, 32, 2)}
SMALL = {"chip": Size(256, 256, 3), "cpu": Size(32, 32, 2), "npu": Size(32, 32, 2)}


class Decoder:
    """Attention (as one product) and MLP, each followed by a reduce and an addition, in micro-batches.

    Args:
        name: device name.
        size: decoder size.

    Attributes:
        elements: number of elements that a reduce sends to the host and back.
    """

    def __init__(self, name: str, size: Size) -> None:
        open_standin(name)
        self.size = size
        self.device: Any = open_device(name)
        self.elements = 0
        kind = torch.bfloat16 if get_scale(name) == "chip" else torch.float32
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).div_(shape[-1] ** 0.5).to(kind).to(name)

        hidden = size.hidden
        self._out, self._up, self._down = make(hidden, hidden), make(hidden, 4 * hidden), make(4 * hidden, hidden)
        self.inputs = [(make(size.tokens, hidden),) for _ in range(MICRO_BATCHES)]
        self._host = torch.empty(size.tokens * hidden, dtype=kind, pin_memory=name != "cpu")
        self.program = self._record()

    @property
    def all_elements(self) -> int:
        """How many a reduce sends that sends a whole tensor."""
        return self.size.tokens * self.size.hidden

    @property
    def reduces(self) -> int:
        """How many there are in all micro-batches."""
        return REDUCES * MICRO_BATCHES * self.size.layers

    def prepare(self, policy: Callable[..., Any], device: Device | None = None) -> Executor:
        """Return what runs the micro-batches in the order of a policy."""
        programs = [self.program] * MICRO_BATCHES
        schedule = lower(programs, policy(programs))
        validate(schedule)
        chosen = self.device if device is None else device
        return GeneratedExecutor(schedule, chosen, EventTable(chosen))

    def compute_in_turn(self) -> list[torch.Tensor]:
        """Return what a plain loop computes."""
        outputs = run_sequential([self.program] * MICRO_BATCHES, self.inputs)
        self.synchronize()
        return [tensor.cpu() for (tensor,) in outputs]

    def compute(self, executor: Executor) -> list[torch.Tensor]:
        """Return what a schedule computes."""
        outputs = executor.run(self.inputs)
        self.synchronize()
        return [tensor.cpu() for (tensor,) in outputs]

    def synchronize(self) -> None:
        """Wait for all that was issued."""
        if hasattr(self.device, "synchronize"):
            self.device.synchronize()

    def measure(self, run: Callable[[], Any], rounds: int) -> tuple[float, float]:
        """Return the median seconds until *run* is done, and until it is issued."""
        seconds, issued = [], []
        for _ in range(rounds + 2):
            self.synchronize()
            start = time.perf_counter()
            run()
            issued.append(time.perf_counter() - start)
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return median(seconds[2:]), median(issued[2:])

    def capture(self, executor: Executor) -> tuple[Any, Any]:
        """Return a graph of a run, and the outputs that each replay writes."""
        backend = self.device.backend
        graph = {"npu": "NPUGraph", "cuda": "CUDAGraph"}[self.device.name]
        captured = getattr(backend, graph)()
        self.synchronize()
        with backend.graph(captured, stream=backend.Stream()):
            outputs = executor.run(self.inputs)
        return captured, outputs

    def record(self, executor: Executor) -> Timeline:
        """Return when each op of a run began and ended."""
        self.synchronize()
        recorder = Recorder()
        executor.run(self.inputs, instrument=recorder)
        self.synchronize()
        return recorder.timeline()

    def _record(self) -> Program:
        p = ProgramBuilder()
        x = p.input("x")
        for index in range(self.size.layers):
            with p.layer(index):
                y = p.compute("attention", self._attend, x)
                y = p.comm("attn_reduce", self._send, y, overwrites=(y,), exclusive="host")
                x = p.compute("attn_add", torch.add, x, y)
                y = p.compute("mlp", self._feed, x)
                y = p.comm("mlp_reduce", self._send, y, overwrites=(y,), exclusive="host")
                x = p.compute("mlp_add", torch.add, x, y)
        return p.build(x)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x) @ self._out

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(normalize(x) @ self._up) @ self._down

    def _send(self, x: torch.Tensor) -> torch.Tensor:
        flat, left = x.view(-1), self.elements
        while left > 0:
            count = min(left, flat.numel())
            self._host[:count].copy_(flat[:count], non_blocking=True)
            flat[:count].copy_(self._host[:count], non_blocking=True)
            left -= count
        return x


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Return *x* [tokens, hidden] with rows of mean square 1."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def open_standin(name: str) -> None:
    """Load the stand-in for CANN where *name* is the NPU.

    Raises:
        RuntimeError: if it cannot be built, with the reason.
    """
    if name != "npu":
        return
    problem = importlib.import_module("tests.support.devices.rigs").load_standin()
    if problem is not None:
        raise RuntimeError(problem)
