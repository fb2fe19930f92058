"""A small decoder with latent attention and experts, in plain torch, whose ops can be slowed down one by one.

`dbo_models.deepseek` decomposes it, so the program is the adapter's own. All experts are on this rank: dispatch and
combine copy, in the place of communication.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from dbo_models.deepseek import DeepseekAdapter
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program

HIDDEN, HEADS, HEAD, ROTARY, LATENT, QUERY_LATENT, EXPERTS = 32, 4, 8, 8, 16, 16, 4
CONTEXT = 24  # tokens that the cache has room for, of each request
POISON = 100.0  # what is in the cache where nothing was written yet


def make_weight(*shape: int) -> torch.Tensor:
    """Return a weight that keeps the size of what it is multiplied with, the next of those that the seed gives."""
    return (torch.randn(shape) / shape[-2] ** 0.5).npu()


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn *x* [tokens, heads, rotary] by its positions [tokens]."""
    angles = (positions.unsqueeze(-1) * 0.1).unsqueeze(1)
    one, other = x[..., : ROTARY // 2], x[..., ROTARY // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class Current:
    """What the current forward context is to a model: which micro-batch runs, and where its tokens are.

    Every request has one token in a step. Only ops on `compute` may look at it. All that it gives is on the device
    beforehand: a copy would keep the host waiting.

    Attributes:
        parts: the requests of each micro-batch.
    """

    def __init__(self, positions: torch.Tensor, parts: Sequence[slice]) -> None:
        self.parts = parts
        self.micro_batch = 0
        slots = torch.arange(len(positions)) * CONTEXT + positions
        beyond = torch.arange(CONTEXT).unsqueeze(0) > positions.unsqueeze(1)
        self._slots = [slots[part].npu() for part in parts]
        self._beyond = [beyond[part].unsqueeze(1).npu() for part in parts]

    def enter(self, micro_batch: int) -> None:
        """Go on with a micro-batch: what an executor calls."""
        self.micro_batch = micro_batch

    @property
    def requests(self) -> slice:
        """The requests of this micro-batch."""
        return self.parts[self.micro_batch]

    @property
    def slots(self) -> torch.Tensor:
        """Where in the cache this micro-batch's tokens are written to [tokens]."""
        return self._slots[self.micro_batch]

    @property
    def beyond(self) -> torch.Tensor:
        """Which of the cache's tokens come later than these [tokens, 1, context]."""
        return self._beyond[self.micro_batch]


class Norm:
    """A norm that adds the residual, as vLLM's do."""

    def __init__(self) -> None:
        self._weight = torch.ones(HIDDEN).npu()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self._norm(x)
        total = x + residual
        return self._norm(total), total

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self._weight


class LatentParts:
    """Latent attention in parts; see `dbo_runtime.adapters.contract.LatentAttention`."""

    def __init__(self, has_latent: bool, requests: int) -> None:
        self.has_latent = has_latent
        self.current: Any = None
        self._to_queries = make_weight(HIDDEN, QUERY_LATENT)
        self._to_keys = make_weight(HIDDEN, LATENT + ROTARY)
        self._queries = make_weight(QUERY_LATENT, HEADS * (HEAD + ROTARY))
        self._absorb_keys = make_weight(HEADS, HEAD, LATENT)
        self._absorb_values = make_weight(HEADS, LATENT, HEAD)
        self._out = make_weight(HEADS * HEAD, HIDDEN)
        self.cache = torch.empty(requests * CONTEXT, LATENT + ROTARY).npu()

    def get_slots(self) -> torch.Tensor:
        slots: torch.Tensor = self.current.slots
        return slots

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ self._to_queries, x @ self._to_keys], dim=-1)

    def write_keys(
        self, latent: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = latent[:, QUERY_LATENT:] if self.has_latent else latent @ self._to_keys
        keys, rotary = own[:, :LATENT].tanh(), turn(own[:, LATENT:].unsqueeze(1), positions)
        self.cache.index_copy_(0, slots, torch.cat([keys, rotary.squeeze(1)], dim=-1))
        return keys, rotary

    def make_queries(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        own = latent[:, :QUERY_LATENT] if self.has_latent else latent @ self._to_queries
        queries = (own.tanh() @ self._queries).view(-1, HEADS, HEAD + ROTARY)
        return torch.cat([queries[..., :HEAD], turn(queries[..., HEAD:], positions)], dim=-1)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Attend to the cache alone, as decodes do: keys that are not there yet are read as what was there before."""
        cache = self.cache.view(-1, CONTEXT, LATENT + ROTARY)[self.current.requests]
        looked_up = torch.matmul(queries[..., :HEAD].transpose(0, 1), self._absorb_keys).transpose(0, 1)
        scores = torch.matmul(torch.cat([looked_up, queries[..., HEAD:]], dim=-1), cache.transpose(1, 2))
        weights = scores.masked_fill(self.current.beyond, -1e9).softmax(-1)
        values = torch.matmul(weights, cache[..., :LATENT])
        return torch.matmul(values.transpose(0, 1), self._absorb_values).transpose(0, 1).reshape(-1, HEADS * HEAD)

    def project_out(self, attended: torch.Tensor) -> torch.Tensor:
        return attended @ self._out


class ExpertParts:
    """A mixture of experts in parts; see `dbo_runtime.adapters.contract.ExpertParallel`."""

    exchanges_sizes = False
    has_shared_experts = True
    may_move_to_side = is_fused = is_sequence_parallel = reduces_shared_experts = False

    def __init__(self) -> None:
        self._gate, self._shared = make_weight(HIDDEN, EXPERTS), make_weight(HIDDEN, HIDDEN)
        self._experts = make_weight(EXPERTS, HIDDEN, HIDDEN)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self._gate).softmax(-1)

    def exchange_sizes(self, routing: torch.Tensor) -> torch.Tensor:
        return routing

    def dispatch(self, x: torch.Tensor, routing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), routing.clone()

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self._shared).tanh()

    def experts(self, arrived: torch.Tensor) -> torch.Tensor:
        """Run every expert on every token -> [experts, tokens, hidden]."""
        return torch.matmul(arrived.unsqueeze(0).repeat(EXPERTS, 1, 1), self._experts).tanh()

    def combine(self, routed: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        return (routed * back.transpose(0, 1).unsqueeze(-1)).sum(0)

    def merge(self, routed: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        for other in shared:
            routed.mul_(2).add_(other)
        return routed


class Parts:
    """The collectives of one rank: modules are their own parts, and nothing is summed up."""

    reduces = False

    def decompose(self, experts: ExpertParts, get_logits: Any = None, takes_chunks: bool = False) -> ExpertParts:
        return experts

    def decompose_attention(self, attention: LatentParts) -> LatentParts:
        return attention

    def divide_attention(self, attention: LatentParts, attend: Any) -> None:
        """Return None: nano-batches run attention as one op."""

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        return module

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is summed up here")


class LatentDecoder:
    """A decoder with a cache, and the program that the adapter of DeepSeek declares of it.

    Args:
        layers: how many.
        requests: of which each has one token in a step.
        parts: the requests of each micro-batch.
        has_latent: see `dbo_runtime.adapters.contract.LatentAttention`.
    """

    def __init__(self, layers: int, requests: int, parts: Sequence[slice], has_latent: bool = False) -> None:
        torch.manual_seed(layers)
        self._positions = 3 + torch.arange(requests) % (CONTEXT - 3)
        self._hidden = torch.randn(requests, HIDDEN)
        self._parts = parts
        self.current = Current(self._positions, parts)
        self._attentions = [LatentParts(has_latent, requests) for _ in range(layers)]
        stack = [
            SimpleNamespace(
                input_layernorm=Norm(),
                self_attn=attention,
                post_attention_layernorm=Norm(),
                mlp=SimpleNamespace(experts=ExpertParts()),
            )
            for attention in self._attentions
        ]
        for attention in self._attentions:
            attention.current = self.current
        model = SimpleNamespace(model=SimpleNamespace(layers=stack, norm=Norm()))
        self.program = name_kernels(record_program(DeepseekAdapter(), model, Parts(), has_side=True), self.current)

    def make_inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each micro-batch's inputs, after forgetting what the last step has written to the cache."""
        earlier = torch.randn(self._attentions[0].cache.shape, generator=torch.Generator().manual_seed(1))
        slots = torch.arange(len(self._positions)) * CONTEXT + self._positions
        earlier[slots] = POISON
        for attention in self._attentions:
            attention.cache.copy_(earlier)
        torch.npu.synchronize()
        return [(self._hidden[part].npu(), self._positions[part].npu()) for part in self._parts]


@dataclass(frozen=True)
class NamedKernel:
    """An op that begins with a kernel of its own name, such as `L2.keys/1` of micro-batch 1, which does nothing.

    Delays are set, and traces read, by the names of kernels, and ops share those that do their work.
    """

    op: Op
    current: Current

    def __call__(self, *values: Any) -> Any:
        launch_nothing(f"{self.op.label}/{self.current.micro_batch}")
        return self.op.fn(*values)


def name_kernels(program: Program, current: Current) -> Program:
    """Return the program with a kernel of its own name before each op."""
    return replace(program, ops=tuple(replace(op, fn=NamedKernel(op, current)) for op in program.ops))


def launch_nothing(name: str) -> None:
    """Queue a kernel on the current stream that takes no time of its own.

    It is C's `abs` of 0, which gives 0, for "well done": a function in Python would wait for the interpreter's lock.
    """
    runtime, nothing = ctypes.CDLL("libascendcl.so"), ctypes.CDLL(None).abs
    submit = runtime.standin_submit_function
    submit.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p
    stream = torch.npu.current_stream().npu_stream  # after this, all that was launched before is on its stream
    error = submit(stream, name.encode(), ctypes.cast(nothing, ctypes.c_void_p), None)
    assert not error, f"the stand-in refused the kernel {name} with error {error}"
