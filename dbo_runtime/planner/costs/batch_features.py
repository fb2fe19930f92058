"""The features of a batch that op times depend on: counts, no costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.errors import ConfigError


class BatchFeatures(NamedTuple):
    """The amount of work in a micro-batch, or in an unsplit step.

    Attention runs decodes and prefills in different kernels with different costs, so their pairs are counted
    separately.
    """

    tokens: int  # tokens of all requests
    pairs: float = 0.0  # query-key pairs among each prefill's new tokens, under a causal mask
    context_pairs: float = 0.0  # pairs of a prefill's new tokens and its cached tokens
    prefills: float = 0.0  # requests that are prefills
    context: float = 0.0  # prefills' tokens already in the KV cache
    decodes: float = 0.0  # tokens of decodes
    decode_pairs: float = 0.0  # query-key pairs of decodes


def measure_features(query_lens: Sequence[int], context_lens: Sequence[int], decode_len: int = 1) -> BatchFeatures:
    """Return the features of requests with *query_lens* new tokens each [requests].

    *context_lens* are each request's tokens already in the KV cache [requests]; () means none. A query token attends to
    the whole context and, among the new tokens, to those up to itself. Requests of up to *decode_len* tokens are
    decodes.

    Raises:
        ConfigError: the two differ in length.
    """
    if context_lens and len(context_lens) != len(query_lens):
        raise ConfigError(f"context_lens has {len(context_lens)} requests and query_lens {len(query_lens)}.")
    contexts = context_lens or (0,) * len(query_lens)
    prefills = [(q, context) for q, context in zip(query_lens, contexts, strict=True) if q > decode_len]
    tokens, prefill_tokens = sum(query_lens), sum([q for q, _ in prefills])
    decodes, context = tokens - prefill_tokens, sum([context for _, context in prefills])
    if decodes == len(query_lens) - len(prefills):  # all decodes have one token, as usual: quicker to count
        decode_pairs = decodes + sum(contexts) - context
    else:
        decode_pairs = sum(q * (c + q) for q, c in zip(query_lens, contexts, strict=True) if q <= decode_len)
    return BatchFeatures(
        tokens=tokens,
        pairs=float(sum([q * (q + 1) // 2 for q, _ in prefills])),
        context_pairs=float(sum([q * context for q, context in prefills])),
        prefills=float(len(prefills)),
        context=float(context),
        decodes=float(decodes),
        decode_pairs=float(decode_pairs),
    )
