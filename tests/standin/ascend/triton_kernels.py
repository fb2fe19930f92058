"""Kernels in the place of those of Triton: of gated linear attention, and of norms across tensor parallel ranks.

Exponentials are computed in float64, as in linear_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from standin_ascend.kernels import launch, view_on_host
from standin_ascend.vision import compute_rotation


class TritonKernel:
    """In place of a Triton kernel, `kernel[grid](...)`: computes all of its grid at once.

    A call returns the kernel, as one of Triton's returns what it has compiled, which is called alike.
    """

    pre_run_hooks = ()

    def __init__(self, name: str, compute: Callable[..., None]) -> None:
        self._name, self._compute = name, compute

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., TritonKernel]:
        def run(*arguments: Any, **options: Any) -> TritonKernel:
            named = {name: view_on_host(value) for name, value in options.items()}
            launch(self._name, partial(self._compute, **named), *arguments)
            return self

        return run


def gather_states(
    states: torch.Tensor, indices: torch.Tensor, has_state: torch.Tensor, out: torch.Tensor, *rest: Any, **options: Any
) -> None:
    """`_gather_ssm_states_kernel`: states of requests [requests, ...]; zeros for those that have none."""
    for request, index in enumerate(indices.tolist()):
        out[request] = states[index].to(out.dtype) if has_state[request] else 0


def scatter_states(
    states: torch.Tensor, indices: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any
) -> None:
    """`_scatter_ssm_states_kernel`: write states of requests to their blocks."""
    for request, index in enumerate(indices.tolist()):
        states[index] = source[request].to(states.dtype)


def norm_by_length(x: torch.Tensor, out: torch.Tensor, eps: float, *rest: Any, **options: Any) -> None:
    """`l2norm_fwd_kernel2`: divide each row by its length, in float32."""
    rows = x.float()
    out.copy_(rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + eps))


def norm_by_length_in_loop(*, X: torch.Tensor, Y: torch.Tensor, eps: float, **options: Any) -> None:
    """`l2norm_fwd_kernel2_loop`: the same, called by names."""
    norm_by_length(X, Y, eps)


def clear_states(states: torch.Tensor, has_state: torch.Tensor, *rest: Any, **options: Any) -> None:
    """`_clear_ssm_states_kernel`: zero the states of requests that start [requests, ...]."""
    states[~has_state] = 0


def gate_states(
    g: torch.Tensor,
    beta: torch.Tensor,
    log_a: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    sequence_length: int,
    heads: int,
    batches: int,
    slope: float,
    threshold: float,
    **options: Any,
) -> None:
    """`fused_gdn_gating_kernel`: by how much states decay, and are corrected [1, tokens, heads]."""
    g.copy_(-log_a.double().exp() * F.softplus(a.double() + bias.double(), slope, threshold))
    beta.copy_(b.double().sigmoid())


def norm_and_gate(
    x: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    means: torch.Tensor | None,
    deviations: torch.Tensor,
    *sizes: Any,
    **options: Any,
) -> None:
    """`_layer_norm_fwd_1pass_kernel_npu`: norm rows [rows, size], then multiply them by the gate."""
    *_, size, eps = sizes
    if (
        bias is not None
        or z is None
        or size != x.shape[1]
        or not (options["NORM_BEFORE_GATE"] and options["IS_RMS_NORM"])
    ):
        raise NotImplementedError("layer_norm_fwd_npu but of whole rows, by their squares, without bias, before a gate")
    rows = x.float()
    deviations.copy_(torch.rsqrt(rows.square().mean(-1) + eps))
    out.copy_(rows * deviations[:, None] * weight.float() * F.silu(z.double()).float())


def split_projections(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    key_heads: int,
    heads: int,
    key_size: int,
    size: int,
    *rest: Any,
) -> None:
    """`fused_qkvzba_split_reshape_cat_kernel`: what is projected for each key head, ordered by what it is."""
    shared = heads // key_heads
    parts = mixed.unflatten(-1, (key_heads, -1)).split([key_size, key_size, shared * size, shared * size], -1)
    qkv.copy_(torch.cat([part.flatten(1) for part in parts[:3]], -1))
    z.copy_(parts[3].reshape(z.shape))
    for out, part in zip((b, a), gates.unflatten(-1, (key_heads, -1)).split(shared, -1), strict=True):
        out.copy_(part.flatten(1))


def split_and_square(
    qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, squares: torch.Tensor, *rest: Any
) -> None:
    """`_split_qkv_and_compute_local_qk_var_kernel`: queries, keys, values; means of squares of the former two."""
    parts = qkv.split([q.shape[1], k.shape[1], v.shape[1]], -1)
    for part, out in zip(parts, (q, k, v), strict=True):
        out.copy_(part)
    for column, part in enumerate(parts[:2]):
        squares[:, column] = part.float().square().mean(-1)


def norm_and_rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    stride: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    share: float,
    *sizes: int,
) -> None:
    """`_apply_global_rmsnorm_kernel`: norm rows by sums of ranks' means, and rotate the first values of each head."""
    *_, head_size, rotated, _ = sizes
    cos, sin = (table[:, None, :rotated] for table in (cos, sin))
    for column, (x, weight) in enumerate(((q, q_weight), (k, k_weight))):
        scale = torch.rsqrt(squares[:, column, None] * share + eps)
        heads = (x.float() * scale * weight.float()).unflatten(-1, (-1, head_size))
        out = x.unflatten(-1, (-1, head_size))
        out.copy_(heads)
        compute_rotation(heads[..., :rotated], cos, sin, out[..., :rotated])
