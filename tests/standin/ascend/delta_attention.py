"""Operators of Kimi Delta Attention (Kimi-K3, GLM-5.3-Flash): gated delta rules with a decay for each channel of a key.

States are those of linear_attention.py (Kimi Linear, arXiv:2510.26692, equation 1). See there on exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from standin_ascend.hyper_connections import norm
from standin_ascend.kernels import launch
from standin_ascend.linear_attention import follow
from standin_ascend.triton_kernels import gather_states

EPSILON = 1e-6  # added to the squares of queries and keys
KNOWN = {"layout": "BSND", "use_gate_in_kernel": True, "state_v_first": True, "safe_gate": True}
OF_CHUNKS = {"output_final_state": True, "disable_recompute": False, "return_intermediate_states": False}
OF_DECODES = {
    "output_final_state": False,
    "inplace_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "allow_neg_eigval": False,
}


def follow_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    chunk_size: int,
    *,
    initial_state: torch.Tensor,
    cu_seqlens: Sequence[int],
    chunk_indices: Sequence[int],
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fla_npu.ops.ascendc.chunk_kda_fwd`: prefills [1, tokens, heads, size], from states to new ones.

    States are [requests, heads, size, key size]. Queries and keys have length one. Gates are given as projected.
    """
    expect("chunk_kda_fwd", settings, {**KNOWN, **OF_CHUNKS})
    out, states = torch.zeros(v.shape, dtype=v.dtype, device=v.device), torch.empty_like(initial_state)
    tensors = q, k, v, g, beta, initial_state, A_log, dt_bias, out, states
    launch("ChunkKda", compute_chunks, *tensors, [int(at) for at in cu_seqlens], scale, lower_bound)
    return out, states


def compute_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    raw: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
    log_a: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    after: torch.Tensor,
    starts: list[int],
    scale: float,
    lowest: float,
) -> None:
    """Go through each request token by token."""
    decays = find_decays(raw[0], log_a, bias, lowest)
    for request, (first, last) in enumerate(pairwise(starts)):
        state = before[request].float()
        for t in range(first, last):
            state = follow(query[0, t], key[0, t], value[0, t], decays[t], beta[0, t], state, scale, out[0, t])
        after[request] = state.to(after.dtype)


def update_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    scale: float,
    lower_bound: float,
    use_beta_sigmoid_in_kernel: bool,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """`fla_npu.ops.ascendc.recurrent_kda`: decodes [1, tokens, heads, size], which may have drafts.

    Args:
        q: queries as projected, as are the keys.
        g: gates as projected [1, tokens, heads, key size].
        beta: corrections [1, tokens, heads], as projected if the kernel takes their sigmoid.
        state: [blocks, heads, size, key size], updated.
        cu_seqlens: [requests + 1].
        ssm_state_indices: the block of each request's state [requests], or of that of each token [requests, tokens].
        num_accepted_tokens: number, from one, of the block that a request goes on from [requests].
    """
    expect("recurrent_kda", settings, {**KNOWN, **OF_DECODES})
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    tensors = q, k, v, g, beta, state, cu_seqlens, ssm_state_indices, num_accepted_tokens, A_log, dt_bias, out
    launch("RecurrentKda", compute_decodes, *tensors, scale, lower_bound, use_beta_sigmoid_in_kernel)
    return out, None


def compute_decodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    raw: torch.Tensor,
    raw_beta: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    accepted: torch.Tensor | None,
    log_a: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    lowest: float,
    takes_sigmoid: bool,
) -> None:
    """Read the state that the last accepted token left; write that of each token, or of the last one."""
    query, key = (x / x.square().sum(-1, keepdim=True).add(EPSILON).sqrt() for x in (query[0].float(), key[0].float()))
    decays = find_decays(raw[0], log_a, bias, lowest)
    beta = raw_beta[0].double().sigmoid() if takes_sigmoid else raw_beta[0]
    for request, (first, last) in enumerate(pairwise(starts.tolist())):
        places = indices[request].reshape(-1).tolist()
        if first == last:
            continue
        state = states[places[0 if accepted is None else int(accepted[request]) - 1]].float()
        for t in range(first, last):
            state = follow(query[t], key[t], value[0, t], decays[t], beta[t], state, scale, out[0, t])
            place = places[min(t - first, len(places) - 1)]
            states[place] = state.to(states.dtype)


def find_decays(raw: torch.Tensor, log_a: torch.Tensor, bias: torch.Tensor, lowest: float) -> torch.Tensor:
    """Return logarithms of how much of the state is left [tokens, heads, key size], between *lowest* and zero."""
    slopes = log_a.double().exp()[:, None]
    return lowest * (slopes * (raw.double() + bias.double().view(raw.shape[1:]))).sigmoid()


def expect(operator: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuse other settings than the known ones."""
    if settings != known:
        raise NotImplementedError(f"{operator} with other settings than {known}: {settings}")


def gather_initial_states(
    states: torch.Tensor, out: torch.Tensor, indices: torch.Tensor, has_state: torch.Tensor, *rest: Any, **options: Any
) -> None:
    """`_gather_initial_states_kernel`: states of requests; zeros for those that have none."""
    gather_states(states, indices, has_state, out)


def copy_inputs(
    states: torch.Tensor,
    packed: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor,
    packed_indices: torch.Tensor,
    *rest: Any,
    WRITE_BACK: bool,
    **options: Any,
) -> None:
    """`_copy_conv_state_kernel`: the last inputs of requests' convolutions, out of their blocks or back into them."""
    for request, index in enumerate(indices.reshape(len(indices), -1)[:, 0].tolist()):  # the first of its blocks
        is_there = 0 <= index < len(states) and bool(starts[request + 1] > starts[request])
        if not WRITE_BACK:
            packed[request] = states[index] if is_there else 0
            packed_indices[request] = request if is_there else -1
        elif is_there:
            states[index] = packed[request]


def write_results(
    source: torch.Tensor, out: torch.Tensor, ends: torch.Tensor, last_request: int, *rest: Any, **options: Any
) -> None:
    """`_write_output`: the results of all requests' tokens, and zeros for padding [1, tokens, heads, size]."""
    count = min(int(ends[last_request]), source.shape[1])
    out.zero_()
    out[:, :count] = source[:, :count]


def norm_and_gate(
    *, x: torch.Tensor, g: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: None, eps: float, **settings: Any
) -> None:
    """`layer_norm_gated_fwd_kernel`: norm each head [..., size], then multiply it by the gate's sigmoid, in float64."""
    known = {"ACTIVATION": "sigmoid", "IS_RMS_NORM": True, "PACKED_GATE": False, "STRIDED_GATE": False}
    expect("layer_norm_gated_fwd_kernel", {name: settings[name] for name in known}, known)
    y.copy_(norm(x, w, eps).view(y.shape) * g.double().sigmoid().view(y.shape))
