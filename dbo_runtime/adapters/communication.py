"""Interfaces through which adapters declare communication: collectives, and layers decomposed around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class ExpertParallel(Protocol):
    """A mixture of experts whose tokens are dispatched to other ranks, decomposed. Each method is one op.

    Values passed from op to op hold all state between dispatch and combine, so micro-batches share none.
    """

    @property
    def exchanges_sizes(self) -> bool:
        """Whether `exchange_sizes` is a separate op; the host then waits for its result in `dispatch`.

        False where a lane is a thread: a thread can wait without the host, so `dispatch` does both.
        """

    @property
    def has_shared_experts(self) -> bool:
        """Whether there are shared experts, which process every token."""

    @property
    def may_move_to_side(self) -> bool:
        """Whether `gate`, `experts` and `merge` may run while another micro-batch attends.

        True if they read no forward context and their kernels share no scratch memory with attention's.
        """

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether each tensor parallel rank dispatches a chunk of the tokens, without an all-reduce afterwards.

        `gate`, `dispatch`, `combine` and `merge` then take and return this chunk; see `Collectives.take_chunk`.
        """

    @property
    def reduces_shared_experts(self) -> bool:
        """Whether shared experts take all tokens, not a chunk, and return partial sums for `reduce_scatter`."""

    @property
    def is_fused(self) -> bool:
        """Whether kernels dispatch and combine: `run_fused` then replaces every step from `gate` to `combine`."""

    def run_fused(self, x: Any, tokens: Any, input_ids: Any = None) -> Any:
        """Route a chunk *x* [chunk, hidden] and run its experts -> [chunk, hidden]; *tokens*: number in all chunks.

        *input_ids*: as in `gate`.
        """

    def gate(self, x: Any, tokens: Any = None, input_ids: Any = None) -> Any:
        """Choose the experts of each token of *x* [tokens, hidden] -> routing.

        If *x* is a chunk, *tokens* is the number of tokens in all chunks. *input_ids* are the token ids of *x*
        [tokens]; only models that choose experts by token id need them.
        """

    def exchange_sizes(self, routing: Any) -> Any:
        """Exchange the number of tokens that each rank sends to each other -> routing. For the comm lane."""

    def dispatch(self, x: Any, routing: Any) -> tuple[Any, Any]:
        """Send tokens to their experts' ranks -> (tokens received, handle for `combine`). For the comm lane."""

    def shared_experts(self, x: Any) -> Any:
        """Run the shared experts [tokens, hidden] -> [tokens, hidden]."""

    def experts(self, received: Any) -> Any:
        """Run this rank's experts on the received tokens -> [received, hidden]."""

    def combine(self, routed: Any, handle: Any) -> Any:
        """Return results to their tokens' ranks and sum them -> [tokens, hidden]. For the comm lane."""

    def merge(self, routed: Any, *shared: Any) -> Any:
        """Scale *routed* in place and add the shared experts' result, if any -> [tokens, hidden]."""


class LatentAttention(Protocol):
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1), decomposed into queries and keys.

    Each method is one op's function. Only ops on `compute` may read the forward context; `get_slots` reads the KV cache
    slots from it, so that `write_keys` can take them as a value on another lane.
    """

    @property
    def has_latent(self) -> bool:
        """Whether queries and keys share a first projection, `project`. Otherwise each op has its own."""

    def get_slots(self) -> Any:
        """Return the KV cache slots for this micro-batch's tokens [tokens], or None if there are none."""

    def project(self, x: Any) -> Any:
        """Project *x* [tokens, hidden] -> latent [tokens, ranks of queries and of keys, rotary]."""

    def write_keys(self, latent: Any, positions: Any, slots: Any) -> tuple[Any, Any]:
        """Norm the keys, apply the rotary embedding, write to the cache -> ([tokens, rank], [tokens, 1, rotary]).

        May run on the `side` lane.
        """

    def make_queries(self, latent: Any, positions: Any) -> Any:
        """Compute the queries -> [tokens, heads, head]."""

    def attend(self, queries: Any, keys: Any, rotary: Any) -> Any:
        """Attend to the cache and to the results of `write_keys` -> [tokens, heads * head]."""

    def project_out(self, attended: Any) -> Any:
        """Project back -> [tokens, hidden]. Ends in an all-reduce, like attention declared as one op."""


class DividedAttention(NamedTuple):
    """An attention module, divided at the call of attention itself. Each function is one op's.

    Attributes:
        project: (positions [tokens], x [tokens, hidden]) -> what attention takes, such as queries, keys and values, and
            then what is kept for `project_out`, such as a gate; each [tokens, ...]. Token-wise.
        attend: takes what `project` has returned for it -> [tokens, heads * head]. Not token-wise.
        project_out: (attended, *kept) -> [tokens, hidden]. Token-wise; ends in an all-reduce, as the module does.
        taken: number of values that `attend` takes.
        kept: number of values that `project_out` takes besides.
        written: number, from zero, of the value that `attend` takes to write its result to; None if it makes a tensor.
    """

    project: Callable[..., Any]
    attend: Callable[..., Any]
    project_out: Callable[..., Any]
    taken: int
    kept: int = 0
    written: int | None = None


class Collectives(Protocol):
    """A layer's communication, independent of the serving framework."""

    @property
    def reduces(self) -> bool:
        """Whether module results have to be summed over ranks. If not, declare no op for the sum."""

    def decompose(
        self, experts: Any, get_logits: Callable[[Any], Any] | None = None, takes_chunks: bool = False
    ) -> ExpertParallel | None:
        """Return a decomposed mixture of experts, or None if its tokens stay on their rank. It is then one op.

        Pass *get_logits*, [tokens, hidden] -> [tokens, experts], if the experts do not hold their gate. Pass
        *takes_chunks* if the caller also declares the ops of sequence parallel experts; see `is_sequence_parallel`.

        Raises:
            DeclineError: the experts dispatch tokens but cannot be decomposed, or they are sequence parallel and
                *takes_chunks* is false. The model then runs unsplit.
        """

    def decompose_attention(self, attention: Any) -> LatentAttention | None:
        """Return a decomposed latent attention, or None if it stays one op: another kind of attention, or fused."""

    def divide_attention(self, attention: Any, attend: Callable[..., Any]) -> DividedAttention | None:
        """Return an attention module in parts, of which most are token-wise; None if it stays one op.

        *attend* calls the module: (module, positions, x) -> [tokens, hidden].
        """

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* without its final all-reduce, so that it returns this rank's partial sum.

        The returned function raises `ProgramError` if the module does not end in exactly one all-reduce.
        """

    def all_reduce(self, partial: Any) -> Any:
        """Sum *partial* over the ranks in place, and return it. Blocks the lane that runs it."""

    def take_chunk(self, x: Any) -> tuple[Any, Any]:
        """Return this rank's chunk of *x* [tokens, hidden] -> ([chunk, hidden], the number of tokens).

        Chunks of all ranks are equal: the last ones are padded with zeros.
        """

    def reduce_scatter(self, partial: Any) -> tuple[Any, Any]:
        """Sum *partial* [tokens, hidden] over the ranks -> (this rank's chunk of the sum, number of tokens).

        Chunks are cut as in `take_chunk`. For the comm lane.
        """

    def all_gather(self, chunk: Any, tokens: Any) -> Any:
        """Gather the chunks of all ranks [chunk, hidden] -> [tokens, hidden]. For the comm lane."""
