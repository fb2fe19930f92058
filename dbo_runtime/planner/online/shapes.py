"""A few batches that represent all steps that a server may schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dbo_runtime.batch import Batch

SMALLEST_STEP = 32  # tokens; smaller steps are not worth splitting on any known machine
PROMPTS = 4  # number of prompts in steps with several
DECODE_SHARE = 0.25  # share of the tokens that are decodes, in steps with decodes and prompts
CONTEXT_SHARES = (0.0, 0.125, 0.5)  # length of the context before a prompt, as a share of the longest context
DECODE_CONTEXT_SHARES = (0.05, 0.25, 1.0)  # length of the context of each decode, as a share of the longest context


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The most that a scheduler may put into a step.

    Attributes:
        tokens: most tokens of a step (vLLM's `max_num_batched_tokens`).
        requests: most requests of a step (`max_num_seqs`).
        context: most tokens of a request, new ones included (`max_model_len`).
    """

    tokens: int = 8192
    requests: int = 256
    context: int = 32_768


def list_shapes(limits: ServingLimits) -> list[Batch]:
    """Return batches of each size from small to the largest.

    They hold one prompt, also after contexts; several prompts; prompts and decodes; or only decodes. Sizes double from
    one to the next. Orders that are found for these sizes hold for the sizes between, too (see `critical_paths`).
    """
    largest = min(limits.tokens, limits.requests * limits.context)
    return list(dict.fromkeys(batch for tokens in _list_sizes(largest) for batch in _list_batches(tokens, limits)))


def _list_sizes(largest: int) -> Iterator[int]:
    tokens = min(SMALLEST_STEP, largest)
    while tokens < largest:
        yield tokens
        tokens *= 2
    yield largest


def _list_batches(tokens: int, limits: ServingLimits) -> Iterator[Batch]:
    fewest = math.ceil(tokens / limits.context)  # fewest requests that can hold so many tokens
    if fewest == 1:
        for share in CONTEXT_SHARES:
            yield _make_batch(0, 0, tokens, 1, int(share * (limits.context - tokens)))
    prompts = min(max(PROMPTS, fewest), limits.requests, tokens)
    if prompts > 1:
        yield _make_batch(0, 0, tokens, prompts)
    decodes = min(int(DECODE_SHARE * tokens), limits.requests - fewest)
    if decodes > 0:
        prompts = math.ceil((tokens - decodes) / limits.context)
        yield _make_batch(decodes, min(limits.context // PROMPTS, limits.context - 1), tokens - decodes, prompts)
    if 1 < tokens <= limits.requests:
        for share in DECODE_CONTEXT_SHARES:
            yield Batch((1,) * tokens, 0, context_lens=(int(share * (limits.context - 1)),) * tokens)


def _make_batch(decodes: int, decode_context: int, tokens: int, prompts: int, context: int = 0) -> Batch:
    """Return a batch of decodes and of prompts, which have *tokens* tokens together and are as even as possible."""
    lengths = [tokens * (number + 1) // prompts - tokens * number // prompts for number in range(prompts)]
    return Batch((*[1] * decodes, *lengths), tokens, context_lens=(*[decode_context] * decodes, *[context] * prompts))
