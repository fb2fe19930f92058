"""A decomposed mixture of experts whose tokens are dispatched to other ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dbo_models.collectives import record_gather
from dbo_runtime.adapter import Collectives, ExpertParallel
from dbo_runtime.program import ProgramBuilder, Value


@dataclass(frozen=True)
class ExpertsRecorder:
    """Declares the ops of one layer's experts.

    Attributes:
        p: builder of the micro-batch's program.
        collectives: the ranks' communication.
        moe: the experts, decomposed.
        token_wise: whether nano-batches may be dispatched one by one.
        routed_by: hidden states that the gate reads [tokens, hidden], where the experts read others.
    """

    p: ProgramBuilder
    collectives: Collectives
    moe: ExpertParallel
    token_wise: bool = True
    routed_by: Value | None = None

    def record(self, x: Value, input_ids: Value | None = None) -> Value:
        """Declare a mixture of experts whose tokens are dispatched, [tokens, hidden] -> [tokens, hidden].

        With sequence parallelism, each tensor parallel rank dispatches a chunk of the tokens, and an all-gather
        completes them. *input_ids* are the token ids [tokens], if experts are chosen by them.
        """
        if not self.moe.is_sequence_parallel:
            return self.record_dispatch(x, input_ids=input_ids)
        chunk, tokens = self._record_chunk("chunk", x)
        if input_ids is not None:
            input_ids, _ = self._record_chunk("chunk_ids", input_ids)
        routed_by = None if self.routed_by is None else self._record_chunk("gate_chunk", self.routed_by)[0]
        merged = replace(self, routed_by=routed_by).record_dispatch(chunk, tokens, x, input_ids)
        gathered: Value = record_gather(self.p, "gather", self.collectives, merged, tokens)
        return gathered

    def _record_chunk(self, name: str, x: Value) -> tuple[Value, Value]:
        """Declare that this rank takes its chunk; return it, and the number of tokens in all chunks."""
        chunk, tokens = self.p.compute(name, self.collectives.take_chunk, x, outputs=2, token_wise=self.token_wise)
        return chunk, tokens

    def record_dispatch(
        self, x: Value, tokens: Value | None = None, gathered: Value | None = None, input_ids: Value | None = None
    ) -> Value:
        """Declare everything from the gate to the merge, [tokens, hidden] or [chunk, hidden] -> like *x*.

        If dispatch needs sizes, it blocks the host. The shared experts then come first, so that the device has work
        meanwhile. Otherwise they come after dispatch, so that the tokens are sent as early as possible. On a `side`
        lane they depend on the tokens only, so they also overlap with the gate and the experts. If kernels allow it,
        gate, experts and merge may run on `side` while the other micro-batch attends.

        If *x* is a chunk, *tokens* is the number of tokens in all chunks. Shared experts whose weights are divided
        among the ranks then take all tokens: *gathered*, or gathered here if that is None. Their results are reduced
        to chunks. *input_ids* are the token ids of *x*, if experts are chosen by them.
        """
        p, moe = self.p, self.moe
        if moe.is_fused:
            assert tokens is not None, "each rank gives its kernels a chunk"
            return self._record_fused(x, tokens, gathered, input_ids)
        declare = partial(p.may_move_to_side if moe.may_move_to_side else p.compute, token_wise=self.token_wise)
        communicate = partial(p.comm, communicator="experts", token_wise=self.token_wise)
        gate = partial(_choose_by_ids, moe) if tokens is None and input_ids is not None else moe.gate
        reads = x if self.routed_by is None else self.routed_by
        routing = declare("gate", gate, reads, *(value for value in (tokens, input_ids) if value is not None))
        shared: list[Value] = []
        if moe.exchanges_sizes:
            routing = communicate("sizes", moe.exchange_sizes, routing, overwrites=(routing,))
            shared = self._record_shared(x, tokens, gathered)
        received, handle = communicate("dispatch", moe.dispatch, x, routing, outputs=2, host_sync=moe.exchanges_sizes)
        if not moe.exchanges_sizes:
            shared = self._record_shared(x, tokens, gathered)
        shared = self._record_scatters(shared)
        routed = declare("experts", moe.experts, received)
        routed = communicate("combine", moe.combine, routed, handle)
        merged: Value = declare("merge", moe.merge, routed, *shared, overwrites=(routed,))
        return merged

    def _record_fused(self, x: Value, tokens: Value, gathered: Value | None, input_ids: Value | None) -> Value:
        """Declare experts whose kernels dispatch and combine, as the op `moe`: [chunk, hidden] -> [chunk, hidden].

        The shared experts come first, so that their results are reduced while `moe` runs.
        """
        shared = self._record_scatters(self._record_shared(x, tokens, gathered))
        ids = () if input_ids is None else (input_ids,)
        routed = self.p.compute("moe", self.moe.run_fused, x, tokens, *ids, token_wise=self.token_wise)
        merged: Value = self.p.compute(
            "merge", self.moe.merge, routed, *shared, overwrites=(routed,), token_wise=self.token_wise
        )
        return merged

    def _record_scatters(self, shared: list[Value]) -> list[Value]:
        """Declare the reduce-scatter of the shared experts' results, if they are partial sums."""
        if not self.moe.reduces_shared_experts:
            return shared
        scatter = self.collectives.reduce_scatter
        return [
            self.p.comm("shared_scatter", scatter, result, outputs=2, token_wise=self.token_wise)[0]
            for result in shared
        ]

    def _record_shared(self, x: Value, tokens: Value | None, gathered: Value | None) -> list[Value]:
        """Declare the shared experts, if there are any."""
        if not self.moe.has_shared_experts:
            return []
        if self.moe.reduces_shared_experts:
            x = record_gather(self.p, "shared_gather", self.collectives, x, tokens) if gathered is None else gathered
        return [self.p.side("shared_experts", self.moe.shared_experts, x, token_wise=self.token_wise)]


def _choose_by_ids(moe: ExpertParallel, x: Any, input_ids: Any) -> Any:
    return moe.gate(x, None, input_ids)
