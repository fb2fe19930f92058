"""What adapters are given to declare communication with: collectives, and the parts of layers that contain them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class ExpertParallel(Protocol):
    """A mixture of experts, decomposed because its tokens are dispatched to other ranks. Each method is one op.

    All state between dispatch and combine is in the values passed on, so micro-batches share none.
    """

    @property
    def exchanges_sizes(self) -> bool:
        """Whether `exchange_sizes` is a separate op; the host then waits for its result in `dispatch`.

        It is not where a lane is a thread, which can wait without the host: `dispatch` then does both.
        """

    @property
    def has_shared_experts(self) -> bool:
        """Whether there are shared experts, which every token passes."""

    @property
    def may_move_to_side(self) -> bool:
        """Whether `gate`, `experts` and `merge` may run while another micro-batch attends.

        They may if they read no forward context and their kernels share no scratch memory with attention's.
        """

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether each tensor parallel rank dispatches a chunk of the tokens, and no all-reduce follows.

        Then `gate`, `dispatch`, `combine` and `merge` take and return this chunk; see `Collectives.take_chunk`.
        """

    @property
    def reduces_shared_experts(self) -> bool:
        """Whether shared experts take all tokens, not a chunk, and return parts of a sum, for `reduce_scatter`."""

    @property
    def is_fused(self) -> bool:
        """Whether kernels dispatch and combine: then `run_fused` takes the place of all from `gate` to `combine`."""

    def run_fused(self, x: Any, tokens: Any, input_ids: Any = None) -> Any:
        """Route a chunk *x* [chunk, hidden] of *tokens* tokens and run its experts -> [chunk, hidden].

        *input_ids* are as in `gate`.
        """

    def gate(self, x: Any, tokens: Any = None, input_ids: Any = None) -> Any:
        """Choose the experts of each token of *x* [tokens, hidden] -> routing; *tokens* of all chunks if it is one.

        *input_ids* are the token ids of *x* [tokens], where experts are chosen by them.
        """

    def exchange_sizes(self, routing: Any) -> Any:
        """Exchange how many tokens go where -> routing. For the comm lane."""

    def dispatch(self, x: Any, routing: Any) -> tuple[Any, Any]:
        """Send tokens to their experts' ranks -> (tokens received, handle for `combine`). For the comm lane."""

    def shared_experts(self, x: Any) -> Any:
        """Run the shared experts [tokens, hidden] -> [tokens, hidden]."""

    def experts(self, received: Any) -> Any:
        """Run this rank's experts on the tokens received -> [received, hidden]."""

    def combine(self, routed: Any, handle: Any) -> Any:
        """Return results to their tokens' ranks and sum them -> [tokens, hidden]. For the comm lane."""

    def merge(self, routed: Any, *shared: Any) -> Any:
        """Scale *routed* in place and add the shared experts' result, if there is one -> [tokens, hidden]."""


class LatentAttention(Protocol):
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1), decomposed into queries and keys.

    Each method is one op's function. Only ops on `compute` may read the forward context, so the slots of the KV cache
    are a value.
    """

    @property
    def has_latent(self) -> bool:
        """Whether queries and keys share a first projection, `project`. Otherwise each op has its own."""

    def get_slots(self) -> Any:
        """Return the slots of the KV cache that this micro-batch's tokens are written to [tokens], or None for none."""

    def project(self, x: Any) -> Any:
        """Project *x* [tokens, hidden] -> latent [tokens, ranks of queries and of keys, rotary]."""

    def write_keys(self, latent: Any, positions: Any, slots: Any) -> tuple[Any, Any]:
        """Norm keys, apply the rotary embedding, write them to the cache -> ([tokens, rank], [tokens, 1, rotary]).

        May run on the `side` lane.
        """

    def make_queries(self, latent: Any, positions: Any) -> Any:
        """Make queries -> [tokens, heads, head]."""

    def attend(self, queries: Any, keys: Any, rotary: Any) -> Any:
        """Attend to the cache and to the results of `write_keys` -> [tokens, heads * head]."""

    def project_out(self, attended: Any) -> Any:
        """Project back -> [tokens, hidden]. Ends in an all-reduce, as attention in one op does."""


class Collectives(Protocol):
    """An adapter's access to a layer's communication, independent of the serving framework."""

    @property
    def reduces(self) -> bool:
        """Whether results of modules have to be summed over ranks. If not, declare no op for it."""

    def decompose(
        self, experts: Any, get_logits: Callable[[Any], Any] | None = None, takes_chunks: bool = False
    ) -> ExpertParallel | None:
        """Return the parts of a mixture of experts, or None if its tokens stay on their rank: then it is one op.

        Experts that do not hold their gate are routed by *get_logits*, [tokens, hidden] -> [tokens, experts]. With
        *takes_chunks* the caller declares the ops of sequence-parallel parts; see `is_sequence_parallel`.

        Raises:
            DeclineError: if its tokens are dispatched, but it cannot be decomposed, or is sequence parallel and the
                caller does not take that. The model then runs unsplit.
        """

    def decompose_attention(self, attention: Any) -> LatentAttention | None:
        """Return the parts of a latent attention, or None if it is one op: of another kind, or fused."""

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* without the all-reduce at its end: it returns this rank's part of the sum.

        Raises, when called, `ProgramError` if the module does not end in exactly one all-reduce.
        """

    def all_reduce(self, partial: Any) -> Any:
        """Sum *partial* over the ranks in place, and return it. Blocks the lane that runs it."""

    def take_chunk(self, x: Any) -> tuple[Any, Any]:
        """Return this rank's chunk of *x* [tokens, hidden] -> ([chunk, hidden], the number of tokens).

        Chunks of all ranks are equal: the last ones are padded with zeros.
        """

    def reduce_scatter(self, partial: Any) -> tuple[Any, Any]:
        """Sum *partial* [tokens, hidden] over the ranks -> as `take_chunk`, of the sum. For the comm lane."""

    def all_gather(self, chunk: Any, tokens: Any) -> Any:
        """Return the tokens of all ranks' chunks [chunk, hidden] -> [tokens, hidden]. For the comm lane."""
