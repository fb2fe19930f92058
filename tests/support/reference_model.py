"""A small mixture-of-experts decoder in plain torch with its experts on several ranks: the reference for dispatch.

Every rank makes all weights from one seed and runs only its own experts, so tokens have to be dispatched. The model's
`forward` runs all experts in one process without communication; split runs are compared with it. It needs no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from dbo_models.experts import ExpertsRecorder
from dbo_runtime.adapters.communication import Collectives, ExpertParallel
from dbo_runtime.decline import Decline
from dbo_runtime.engine.dispatch import DispatchedTokens, Dispatcher, Routing
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value

SHARED = -1  # the last expert is the shared one

Draw = Callable[..., torch.Tensor]


class ReferenceMoe:
    """A mixture of experts: *top_k* of *experts* for each token, and a shared expert."""

    def __init__(self, draw: Draw, hidden: int, experts: int, top_k: int) -> None:
        self.top_k = top_k
        self.router = draw(hidden, experts)
        self.up = draw(experts + 1, hidden, 2 * hidden)
        self.down = draw(experts + 1, 2 * hidden, hidden)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, which sum to one, and ids of each token's experts, both [tokens, top_k]."""
        weights, ids = (x @ self.router).softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    def run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Run one expert [tokens, hidden] -> [tokens, hidden]."""
        return silu(x @ self.up[expert]) @ self.down[expert]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run all experts on all tokens, with weight 0 for those that a token did not choose."""
        weights, ids = self.choose(x)
        gates = x.new_zeros((x.shape[0], self.router.shape[1])).scatter(1, ids, weights)
        outputs = torch.stack([self.run_expert(expert, x) for expert in range(gates.shape[1])])
        return torch.einsum("te,eth->th", gates, outputs) + self.run_expert(SHARED, x)


class ReferenceLayer:
    """A decoder layer: attention with a cache, then a mixture of experts."""

    def __init__(self, draw: Draw, hidden: int, experts: int, top_k: int) -> None:
        self.query = draw(hidden, hidden)
        self.moe = ReferenceMoe(draw, hidden, experts, top_k)
        self.cache = torch.empty(0, hidden)

    def attend(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Append tokens [tokens, hidden] to the cache, and add attention over it up to each token's position."""
        keys = norm(x)
        self.cache = torch.cat([self.cache, keys])
        scores = keys @ self.query @ self.cache.T
        later = positions[:, None] < torch.arange(self.cache.shape[0])
        return x + scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ self.cache


class ReferenceModel:
    """A stack of layers. Models made with the same arguments have the same weights."""

    def __init__(self, layers: int = 2, hidden: int = 16, experts: int = 12, top_k: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-2])

        self.layers = [ReferenceLayer(draw, hidden, experts, top_k) for _ in range(layers)]

    def clear(self) -> None:
        """Empty all caches."""
        for layer in self.layers:
            layer.cache = layer.cache[:0]

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run all layers and experts on this rank alone [tokens, hidden] -> [tokens, hidden]."""
        for layer in self.layers:
            x = layer.attend(positions, x)
            x = x + layer.moe(norm(x))
        return norm(x)


class ReferenceExperts:
    """One rank's part of a mixture of experts; see `dbo_runtime.adapters.contract.ExpertParallel`."""

    has_shared_experts = True
    is_fused = is_sequence_parallel = reduces_shared_experts = False
    may_move_to_side = False  # the gate reads the sizes of the micro-batch that was entered last

    def __init__(self, moe: ReferenceMoe, collectives: ReferenceCollectives) -> None:
        dispatcher = collectives.dispatcher
        self.exchanges_sizes = dispatcher.exchanges_sizes
        self.exchange_sizes = dispatcher.exchange_sizes
        self.dispatch = dispatcher.dispatch
        self.combine = dispatcher.combine
        self._moe = moe
        self._collectives = collectives

    def gate(self, x: torch.Tensor) -> Routing:
        """Choose experts for *x* [tokens, hidden]."""
        routing = Routing(*self._moe.choose(x), self._collectives.sizes)
        return self._collectives.dispatcher.choose_ranks(routing)

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared expert."""
        return self._moe.run_expert(SHARED, x)

    def experts(self, received: DispatchedTokens) -> torch.Tensor:
        """Sum the weighted results of each row's experts on this rank -> [received, hidden]."""
        routed = torch.zeros_like(received.x)
        for expert in self._collectives.experts:
            rows, places = (received.ids == expert).nonzero(as_tuple=True)
            routed[rows] += received.weights[rows, places, None] * self._moe.run_expert(expert, received.x[rows])
        return routed

    def merge(self, routed: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        """Add the shared expert's result."""
        return routed.add_(*shared)


class ReferenceCollectives:
    """One rank's access to the experts of the others. `enter` a micro-batch before its ops.

    Args:
        dispatcher: sends tokens to experts.
        experts: the ids of those on this rank.
    """

    reduces = False

    def __init__(self, dispatcher: Dispatcher, experts: Sequence[int]) -> None:
        self.dispatcher = dispatcher
        self.experts = experts
        self.sizes: tuple[int, ...] = ()

    def enter(self, sizes: Sequence[tuple[int, ...]], micro_batch: int) -> None:
        """Switch to a micro-batch; *sizes* are the tokens that ranks agreed on [micro-batches][ranks]."""
        self.sizes = sizes[micro_batch]

    def decompose(self, experts: ReferenceMoe, get_logits: Any = None, takes_chunks: bool = False) -> ExpertParallel:
        """Return the parts of *experts* on this rank."""
        return ReferenceExperts(experts, self)

    def without_reduce(self, module: Any) -> Any:
        """Return *module*: each rank has its own tokens, so nothing is reduced."""
        return module

    def all_reduce(self, partial: Any) -> Any:
        """Return *partial*: there is nothing to sum."""
        return partial


class ReferenceAdapter:
    """Declares dispatch and combine in each layer."""

    def decline(self, model: ReferenceModel) -> Decline | None:
        """Return why this model cannot be split, or None."""
        return None if model.layers else Decline("the model has no layers")

    def record(
        self, p: ProgramBuilder, model: ReferenceModel, collectives: Collectives, x: Value, positions: Value
    ) -> Value:
        """Declare the program; reads like `ReferenceModel.forward`."""
        for index, layer in enumerate(model.layers):
            with p.layer(index):
                x = p.compute("attention", layer.attend, positions, x, ordered=True)
                normed = p.compute("norm", norm, x)
                moe = collectives.decompose(layer.moe)
                if moe is None:
                    routed = p.compute("moe", layer.moe, normed)
                else:
                    routed = ExpertsRecorder(p, collectives, moe).record(normed)
                x = p.compute("add", torch.add, x, routed)
        result: Value = p.compute("final_norm", norm, x)
        return result


def place_experts(experts: int, ranks: int) -> torch.Tensor:
    """Return the rank that holds each expert [experts]: in blocks as even as possible."""
    return torch.arange(experts) * ranks // experts


def norm(x: torch.Tensor) -> torch.Tensor:
    """Scale each token to a mean square of one [tokens, hidden] -> [tokens, hidden]."""
    return rms_norm(x, x.shape[-1:])
