"""Properties of vLLM modules that a drafted adapter has to declare."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALL_REDUCE = "tensor_model_parallel_all_reduce"
"""The function that layers call to reduce results that their modules left unreduced."""

EXPERTS = frozenset({"FusedMoE", "MoERunner"})
"""Classes that run experts. The first is the class before vLLM 0.28."""

PROJECTION = "RowParallelLinear"


def describe_module(module: torch.nn.Module) -> dict[str, bool]:
    """Return what a module does besides computing.

    Returns:
        `ordered`: whether it reads or writes state of requests, in the KV cache or of linear attention. `reduces`:
        whether it ends in an all-reduce if there are several ranks, in a projection or in experts. `leaves_reduce`:
        whether it has such a projection, but leaves the all-reduce to its caller.
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
