"""Sparse attention whose tokens (DSA-CP), KV cache (DCP), or both are sharded among tensor parallel ranks.

With DSA-CP, each rank attends with all heads from a chunk of the tokens, and communicates inside attention, through
vLLM's own group. Keys are gathered; then either the last projection's weights are gathered, too, or tokens are
exchanged for heads. With decode context parallelism (DCP), each rank caches a part of the keys. In steps with prefills,
ranks gather the blocks that are referred to. In steps with decodes only, they gather queries, attend to their own keys
and merge the results. All of this is inside one op, so micro-batches share none of it. Read against vllm-ascend
0.30.0rc2, and DSA-CP against 0.23.0.post1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import run_on_chunk

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import AttentionMetadata

ATTENTIONS = ("AscendSFADSACPImpl", "AscendSFADSADCPImpl")
OF_COMPRESSED = "AscendDSACPImpl"  # DeepSeek V4's. From 0.30 on, its adapter hands it chunks
SHARDED = ("AscendSFADCPMetadata", "AscendSFADSADCPMetadata")
"""Metadata of attention whose KV cache is sharded."""


def shares_out_tokens() -> bool:
    """Return whether sparse attention is context parallel in this process."""
    from vllm_ascend.utils import enable_dsa_cp

    return bool(enable_dsa_cp())


def get_unreduced(module: Callable[..., Any], parts: Iterable[torch.nn.Module]) -> Callable[..., Any] | None:
    """Return a *module* with such an attention among its *parts* without its reduce; None if there is none.

    Ranks return partial sums: their own results, with zeros for other tokens. From 0.30 on, the last projection's flag
    says that results are reduced: then ranks gather their results, or all-reduce them. In 0.23 attention takes a chunk
    of the tokens, and returns its results for that. DeepSeek V4's attention is split there only.
    """
    attentions: Iterator[Any] = (getattr(part, "impl", None) for part in parts)
    for attention in attentions:
        if type(attention).__name__ in ATTENTIONS:
            return partial(_run_unreduced, module, attention.o_proj)
        if getattr(attention, "enable_dsa_cp", False) or type(attention).__name__ == OF_COMPRESSED:
            return partial(run_on_chunk, module)
    return None


def _run_unreduced(module: Callable[..., Any], projection: Any, *args: Any) -> torch.Tensor:
    """Run a module [tokens, hidden] whose last *projection* decides whether it reduces."""
    projection.reduce_results = False  # only for this call, because unsplit steps reduce
    try:
        result: torch.Tensor = module(*args)
    finally:
        projection.reduce_results = True
    return result


def keep_exchange(metadata: AttentionMetadata) -> dict[str, Any]:
    """Return build arguments that make the ranks of a slice gather keys if those of its step do.

    A slice without a prefill would gather queries instead, and the merged results differ in rounding. vllm-ascend has
    an argument for ranks without a prefill while other ranks have one (prefill context parallelism). Slices get the
    same.
    """
    if type(metadata).__name__ not in SHARDED or not getattr(metadata, "num_prefills", 0):
        return {}
    return {"pcp_context": SimpleNamespace(global_batch=SimpleNamespace(is_prefilling_np=np.ones(1, dtype=bool)))}
