"""The size of a step, as far as vLLM knows it before the step's requests are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dbo_runtime.vllm_plugin.api.metadata_source import get_source

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext


class BatchSize(NamedTuple):
    """The size of a batch, equal on all ranks of a step. Batches of the same size may still differ."""

    tokens: int
    requests: int
    max_query_len: int

    def count_prefill_tokens(self, decode_len: int) -> int:
        """Return how many tokens belong to prefills, at least. Decodes have up to *decode_len* tokens each."""
        return self.tokens - (self.requests - 1) * decode_len if self.max_query_len > decode_len else 0


def count_tokens(context: ForwardContext, tokens: int) -> int:
    """Return how many of a step's *tokens* tokens are not padding; 0 for a dummy batch, which an idle rank runs."""
    if not context.attn_metadata:
        return tokens if context.dp_metadata is None else 0
    sources = filter(None, map(get_source, context.attn_metadata.values()))
    return min((source.common.num_actual_tokens for source in sources), default=tokens)
