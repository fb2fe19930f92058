"""Operators of gated linear attention as vllm-ascend 0.23.0 calls them. Later releases call those of another package.

Prefills there are four kernels of Triton and two operators. Here they are one kernel, which computes what chunks
compute, but for rounding. It refuses tables of chunks that are not those of its requests. See linear_attention.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from standin_ascend import triton_kernels
from standin_ascend.kernels import launch
from standin_ascend.linear_attention import compute_convolution, compute_decodes, compute_prefills

CHUNK = 64  # tokens of a chunk
PREFILLS = 0  # the mode in which requests may start
SCHEMAS = (
    "npu_causal_conv1d_custom(Tensor(a!) output, Tensor x, Tensor weight, Tensor(b!) conv_state, Tensor? bias_opt,"
    " Tensor? query_start_loc_opt, Tensor? cache_indices_opt, Tensor? initial_state_mode_opt,"
    " Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, int run_mode) -> Tensor(a!)",
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None,"
    " float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None,"
    " Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    "npu_fused_gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, float threshold=20.0)"
    " -> (Tensor g, Tensor beta_output)",
)


def convolve(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    bias_opt: torch.Tensor | None,
    query_start_loc_opt: torch.Tensor,
    cache_indices_opt: torch.Tensor,
    initial_state_mode_opt: torch.Tensor | None,
    num_accepted_tokens_opt: torch.Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> torch.Tensor:
    """`npu_causal_conv1d_custom`: convolutions of prefills, or of decodes, which may have drafts, into *output*.

    Args:
        cache_indices_opt: [requests], or [requests, blocks], of which the first counts.
    """
    indices = cache_indices_opt if cache_indices_opt.dim() == 1 else cache_indices_opt[:, 0]
    starts, activated = query_start_loc_opt, bool(activation_mode)
    if run_mode == PREFILLS:
        tensors = x, weight, bias_opt, conv_state, starts, indices, initial_state_mode_opt, output
        launch("CausalConv1d", compute_convolution, *tensors, activated, (pad_slot_id,))
    else:
        tensors = x, conv_state, weight, bias_opt, indices, starts, num_accepted_tokens_opt, output
        launch("CausalConv1dUpdate", compute_decodes, *tensors, activated, pad_slot_id)
    return output


def gate(
    log_a: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_fused_gdn_gating`: by how much states decay, and are corrected [1, tokens, heads]."""
    tokens, heads = a.shape
    decay = torch.empty(1, tokens, heads, dtype=torch.float32, device=a.device)
    corrected = torch.empty(1, tokens, heads, dtype=b.dtype, device=b.device)
    tensors = decay, corrected, log_a, a, b, bias
    launch("FusedGdnGating", triton_kernels.gate_states, *tensors, 1, heads, tokens, beta, threshold)
    return decay, corrected


def prefill_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    prebuilt_meta: Any,
) -> tuple[Any, ...]:
    """`chunk_gated_delta_rule_fwd`: states [requests, heads, key size, size] of prefills [1, tokens, heads, ...]."""
    out, states = torch.empty_like(v), torch.empty_like(initial_state)
    tensors = q, k, v, g, beta, initial_state, cu_seqlens, prebuilt_meta.chunk_indices_chunk64, out, states
    launch("ChunkGatedDeltaRuleForward", compute_chunks, *tensors, prebuilt_meta.cu_seqlens_host, scale)
    return g, out, None, states, None, None, None


def compute_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
    starts: torch.Tensor,
    chunks: torch.Tensor,
    out: torch.Tensor,
    after: torch.Tensor,
    host_starts: tuple[int, ...],
    scale: float,
) -> None:
    """Go through each request token by token.

    Raises:
        RuntimeError: the host's starts, or the table of chunks, are those of other requests.
    """
    lengths = torch.tensor([last - first for first, last in pairwise(host_starts)])
    counts = (-(-lengths // CHUNK)).tolist()
    expected = [[request, chunk] for request, count in enumerate(counts) for chunk in range(count)]
    if starts.tolist() != list(host_starts) or chunks.tolist() != expected:
        raise RuntimeError(f"chunks {chunks.tolist()} of requests that start at {starts.tolist()}, not {host_starts}")
    rows = (tensor[0] for tensor in (query, key, value, g, beta))
    compute_prefills(*rows, before.transpose(-1, -2), lengths, out[0], after.transpose(-1, -2), scale)
