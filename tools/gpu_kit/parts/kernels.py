"""vLLM's own kernels, whose libraries the kit carries cut to one architecture, against what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..plan import NO_KERNELS
from .findings import say_absent

TOKENS, HIDDEN, EPSILON = 64, 1024, 1e-6
LENGTHS = (100, 200)  # of requests
HEADS = (128, 192)  # sizes, as dense models and latent attention have them
EXPERTS, CHOSEN, INNER = 8, 2, 512
ERRORS = {"cuda": 0.02, "cpu": 0.02}
"""How large a relative error rounding explains, by device."""


def compare_kernels(device: str) -> dict[str, Callable[[], Any]]:
    """Return what compares each kernel: it gives the relative error, or says why there is none here."""
    kernels: dict[str, Callable[[], Any]] = {
        "rms_norm": partial(compare_norm, device),
        "silu_and_mul": partial(compare_activation, device),
    }
    others: dict[str, Callable[[], Any]] = {f"FlashAttention 3, head {size}": partial(attend, size) for size in HEADS}
    others["fused experts"] = compare_experts
    if device != "cuda":
        others = dict.fromkeys(others, lambda: say_absent(NO_KERNELS))
    return kernels | others


def compare_norm(device: str) -> float:
    """Compare the norm over rows."""
    import vllm._custom_ops as ops

    x, weight = make(device, TOKENS, HIDDEN), make(device, HIDDEN).abs()
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, EPSILON)
    expected = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON) * weight.float()
    return measure_error(out, expected)


def compare_activation(device: str) -> float:
    """Compare the activation of an MLP."""
    import vllm._custom_ops  # noqa: F401 - it loads the library

    x = make(device, TOKENS, 2 * HIDDEN)
    out = torch.empty(TOKENS, HIDDEN, dtype=x.dtype, device=device)
    torch.ops._C.silu_and_mul(out, x)
    return measure_error(out, activate(x.float()))


def attend(size: int) -> float:
    """Compare causal attention of two requests with heads of this size."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tokens = sum(LENGTHS)
    q, k, v = (make("cuda", tokens, HIDDEN // 128, size) for _ in range(3))
    offsets = torch.tensor([0, LENGTHS[0], tokens], device="cuda", dtype=torch.int32)
    shared = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS), "causal": True, "fa_version": 3}
    out = flash_attn_varlen_func(q=q, k=k, v=v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **shared)
    attend_plainly = torch.nn.functional.scaled_dot_product_attention
    parts = []
    for first, last in ((0, LENGTHS[0]), (LENGTHS[0], tokens)):
        own = [x[first:last].float().transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(attend_plainly(own[0], own[1], own[2], is_causal=True)[0].transpose(0, 1))
    return measure_error(out, torch.cat(parts))


def compare_experts() -> float:
    """Compare a mixture of experts, a kernel of Triton's that is compiled there."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts

    x = make("cuda", TOKENS, HIDDEN)
    up, down = make("cuda", EXPERTS, 2 * INNER, HIDDEN) / 32, make("cuda", EXPERTS, HIDDEN, INNER) / 32
    weights, chosen = torch.softmax(make("cuda", TOKENS, EXPERTS).float(), -1).topk(CHOSEN)
    with set_current_vllm_config(VllmConfig()):
        out = fused_experts(x, up, down, weights, chosen.to(torch.int32))
    expected = torch.zeros(TOKENS, HIDDEN, device="cuda")
    for slot in range(CHOSEN):
        for expert in range(EXPERTS):
            rows = chosen[:, slot] == expert
            inner = activate(x[rows].float() @ up[expert].float().T)
            expected[rows] += weights[rows, slot, None] * (inner @ down[expert].float().T)
    return measure_error(out, expected)


def activate(x: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half of each row times the second [tokens, 2 * inner] -> [tokens, inner]."""
    first, second = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


def make(device: str, *shape: int) -> torch.Tensor:
    """Return normally distributed bfloat16 of this shape, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16).to(device)


def measure_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a result."""
    return round(float((found.float() - expected).norm() / expected.norm()), 6)
