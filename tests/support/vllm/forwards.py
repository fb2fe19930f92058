"""A split forward of a model of one op, without vLLM's engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.vllm_plugin.context.batch_size import BatchSize
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.split_forwards import assemble

BATCH = Batch((4, 4), prefill_tokens=8)
IDS = torch.arange(8)
POSITIONS = torch.arange(100, 108)
ONE_RANK = SimpleNamespace(world_size=1)


class Model:
    """A model of one op; its own forward does the same as the program that is recorded for it."""

    def __init__(self) -> None:
        self.seen: list[ForwardContext] = []
        self.unsplit: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.slip = 0.0
        self.in_place = False

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None] * 0.5

    def compute(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.seen.append(get_forward_context())
        if self.error is not None:
            raise self.error
        added = positions.reshape(-1, x.shape[0]).sum(0)[:, None]
        return x.add_(added) if self.in_place else x + added

    def forward(self, ids: Any, positions: Any, intermediate: Any = None, embeds: Any = None, **kwargs: Any) -> Any:
        self.unsplit.append((ids, positions, intermediate, embeds, kwargs))
        x = self.embed_input_ids(ids) if embeds is None else embeds
        return x + positions.reshape(-1, x.shape[0]).sum(0)[:, None] + self.slip


class Splitter:
    """Gives each micro-batch a separate context."""

    platform = get_platform("npu")  # which has steps that graphs cannot hold
    dispatch = "all_gather"
    decode_len = 1

    def __init__(self, batch: Batch | Decline = BATCH, contexts: Decline | None = None) -> None:
        self.batch = batch
        self.contexts: Any = contexts
        self.size: BatchSize | None = None
        self.reads = 0
        self.remade: list[int] = []

    def read_batch(self, context: Any, tokens: int) -> Batch | Decline:
        self.reads += 1
        return self.batch

    def read_size(self, context: Any, tokens: int) -> BatchSize | None:
        return self.size

    def split(
        self, context: Any, slices: Sequence[BatchSlice], sizes: Any = (), only: int | None = None
    ) -> list[Any] | Decline:
        if only is not None:
            self.remade.append(only)
            return [make_context()]
        if self.contexts is None:
            self.contexts = [make_context() for _ in slices]
        found: list[Any] | Decline = self.contexts
        return found


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **_: Any) -> None:
        self.events.append(event)

    error = info


def make_context() -> ForwardContext:
    return ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})


def make_forward(
    model: Model,
    splitter: Any = None,
    group: Any = ONE_RANK,
    mode: str = "always",
    check: bool = False,
    transport: str = "network",
    **telemetry: Any,
) -> SplitForward:
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    x = p.compute("compute", model.compute, x, positions)
    program = p.build(p.comm("reduce", lambda x: x, x, overwrites=(x,)))
    config = RuntimeConfig(mode=mode, check=check, min_tokens=1, min_prefill_tokens=0)
    runtime = MicroBatchRuntime(program, VirtualDevice(lambda step: 1.0), config, Lines())
    agreement = Agreement(group)
    decider = StepDecider(runtime, splitter or Splitter(), agreement, transport)
    return assemble(model, decider, agreement, **telemetry)


def run(forward: SplitForward, **kwargs: Any) -> torch.Tensor:
    """Run a step as vLLM's runner does."""
    with override_forward_context(make_context()):
        hidden: torch.Tensor = forward(**{"input_ids": IDS, "positions": POSITIONS, **kwargs})
    return hidden


EXPECTED = Model().forward(IDS, POSITIONS)
