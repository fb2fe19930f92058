"""What vLLM's modules do that a draft of an adapter has to declare."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALL_REDUCE = "tensor_model_parallel_all_reduce"
"""The function by which a layer reduces what its modules leave unreduced."""

EXPERTS = frozenset({"FusedMoE", "MoERunner"})
"""What runs experts; the first is its class of before 0.28."""

PROJECTION = "RowParallelLinear"


def describe_module(module: torch.nn.Module) -> dict[str, bool]:
    """Return what a module does besides computing.

    Returns:
        `ordered`, whether it reads or writes state of requests, the KV cache or that of linear attention; `reduces`,
        whether it ends in an all-reduce where there are several ranks, that of a projection or of experts;
        `leaves_reduce`, whether it has such a projection, and leaves the all-reduce to its caller.
    """
    parts = list(module.modules())
    names = [{base.__name__ for base in type(part).__mro__} for part in parts]
    projections = [part for part, bases in zip(parts, names, strict=True) if PROJECTION in bases]
    has_experts = any(not EXPERTS.isdisjoint(bases) for bases in names)
    reduces = has_experts or any(part.reduce_results for part in projections)
    return {
        "ordered": any(hasattr(part, "kv_cache") for part in parts),
        "reduces": reduces,
        "leaves_reduce": bool(projections) and not reduces,
    }
