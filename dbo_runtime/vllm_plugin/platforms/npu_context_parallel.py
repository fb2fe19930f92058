"""Sparse attention whose tokens are shared out among tensor parallel ranks (DSA-CP).

Each rank attends with all heads from a chunk of the tokens, and reaches the other ranks inside attention, through
vLLM's own group: keys are gathered, and then either the weights of the last projection are gathered, too, or tokens are
exchanged for heads. All of it is within one op, so micro-batches share none of it. Read against vllm-ascend 0.30.0rc2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTIONS = ("AscendSFADSACPImpl",)


def shares_out_tokens() -> bool:
    """Return whether sparse attention is context parallel in this process."""
    from vllm_ascend.utils import enable_dsa_cp

    return bool(enable_dsa_cp())


def get_projection(parts: Iterable[torch.nn.Module]) -> torch.nn.Module | None:
    """Return the last projection of such an attention among *parts*; None if there is none.

    Where it says that results are reduced, ranks gather what each has computed, or all-reduce it. Where it does not,
    they return parts of a sum either way: what a rank has computed, and zeros for other tokens.
    """
    attentions: Iterator[Any] = (getattr(part, "impl", None) for part in parts)
    found = (attention.o_proj for attention in attentions if type(attention).__name__ in ATTENTIONS)
    return next(found, None)
