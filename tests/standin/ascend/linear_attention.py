"""Operators of gated linear attention (Qwen3-Next, Qwen3.5): convolutions, and the gated delta rule.

Each request keeps two states, which operators read and update in place: the last inputs of its convolution, and what
it has seen (Yang et al., Gated Delta Networks, 2024, equation 10). See attention.py for how operators are made.

Exponentials are computed in float64 and rounded: in float32, those of torch's vectorized loops and of what is left over
after them differ in the last bit, so a row would depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from standin_ascend.kernels import launch, refuse

EMPTY_BLOCK = 0  # of requests that pad a batch


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None,
    pad_slot_id: int,
    null_block_id: int,
) -> torch.Tensor:
    """`fla_npu.ops.ascendc.causal_conv1d_fn`: a causal convolution of *x* [tokens, channels], request by request.

    Args:
        weight: [taps, channels].
        conv_states: [blocks, at least taps - 1, channels].
        query_start_loc: [requests + 1].
        cache_indices: [requests].
        has_initial_state: [requests]; the others start with zeros.
    """
    out = torch.zeros_like(x)
    settings = activation == "silu", (pad_slot_id, null_block_id)
    tensors = x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, out
    launch("CausalConv1d", compute_convolution, *tensors, *settings)
    return out


def compute_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    has_state: torch.Tensor,
    out: torch.Tensor,
    activated: bool,
    padding: tuple[int, ...],
) -> None:
    """Leave the last inputs of each request in its state."""
    kept = weight.shape[0] - 1
    for request, index in enumerate(indices.tolist()):
        first, last = starts[request : request + 2].tolist()
        if index in padding or first == last:
            continue
        state = states[index, :kept]
        line = torch.cat([state if has_state[request] else torch.zeros_like(state), x[first:last]])
        out[first:last] = slide(line, weight, bias, activated)
        state.copy_(line[-kept:])


def slide(line: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activated: bool) -> torch.Tensor:
    """Convolve inputs [taps - 1 + tokens, channels] in float32; return [tokens, channels]."""
    taps = weight.shape[0]
    count = len(line) - taps + 1
    total = sum((line[tap : tap + count].float() * weight[tap].float() for tap in range(taps)), torch.tensor(0.0))
    total = total if bias is None else total + bias.float()
    return F.silu(total.double()) if activated else total


def convolve_decodes(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    null_block_id: int,
    max_query_len: int = 0,
    out: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fla_npu.ops.ascendc.causal_conv1d_update`: the same of decodes, which may have drafts.

    The state of a request with drafts also has the inputs of drafts, of which *num_accepted_tokens* [requests] less
    one were accepted after the last step.
    """
    out = torch.zeros_like(x) if out is None else out
    tensors = x, conv_state, weight, bias, conv_state_indices, query_start_loc, num_accepted_tokens, out
    launch("CausalConv1dUpdate", compute_decodes, *tensors, activation == "silu", null_block_id)
    return out


def compute_decodes(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    starts: torch.Tensor,
    accepted: torch.Tensor | None,
    out: torch.Tensor,
    activated: bool,
    padding: int,
) -> None:
    """Go on from the inputs before the first token that was not accepted."""
    kept = weight.shape[0] - 1
    for request, index in enumerate(indices.tolist()):
        first, last = starts[request : request + 2].tolist()
        if index in (padding, -1) or first == last:
            continue
        skipped = 0 if accepted is None else int(accepted[request]) - 1
        line = torch.cat([states[index, skipped : skipped + kept], x[first:last]])
        out[first:last] = slide(line, weight, bias, activated)
        states[index, : len(line) - 1] = line[1:]


def update_states(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    actual_seq_lengths: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fla_npu.ops.ascendc.recurrent_gated_delta_rule`: tokens one by one, each of which has a place for its state.

    Args:
        query: [tokens, key heads, key size], as is the key.
        value: [tokens, heads, size].
        state: [blocks, heads, size, key size].
        g: logarithms of how much of the state is left [tokens, heads].
        beta: [tokens, heads].
        actual_seq_lengths: the start of the first request, and how many tokens each has [requests + 1].
        ssm_state_indices: [requests x tokens of a request with all its drafts].
        num_accepted_tokens: from which of its places a request goes on, counted from one [requests].
    """
    out = torch.empty_like(value)
    tensors = query, key, value, g, beta, state, actual_seq_lengths, ssm_state_indices, num_accepted_tokens, out
    launch("RecurrentGatedDeltaRule", compute_recurrence, *tensors, scale)
    return out


def compute_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    lengths: torch.Tensor,
    indices: torch.Tensor,
    accepted: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Read the state where the last accepted token left it, and write that of each token."""
    first, *counts = lengths.tolist()
    places = indices.view(len(counts), -1)
    for request, count in enumerate(counts):
        here = slice(first, first + count)
        first += count
        at = 0 if accepted is None else int(accepted[request]) - 1
        state = states[places[request, at]].float() if count else None
        for token in range(here.start, here.stop):
            state = follow(query[token], key[token], value[token], g[token], beta[token], state, scale, out[token])
            states[places[request, token - here.start]] = state.to(states.dtype)


def follow(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Let the state [heads, size, key size] decay, correct what it has for the key, read it; return it."""
    shared = value.shape[0] // key.shape[0]
    query, key = (part.float().repeat_interleave(shared, 0) for part in (query, key))
    state = state * g.double().exp().float().view(len(g), 1, -1)  # by head, or by head and channel of the key
    missing = value.float() - torch.bmm(state, key[..., None])[..., 0]
    state = state + (beta.float()[:, None] * missing)[..., None] * key[:, None]
    out.copy_(torch.bmm(state, (query * scale)[..., None])[..., 0])
    return state


def prefill_states(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    actual_seq_lengths: torch.Tensor,
    scale: float,
    g: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_chunk_gated_delta_rule`: the same of prefills, from states [requests, heads, size, key size] to new ones."""
    refuse("npu_chunk_gated_delta_rule", rest)
    if initial_state.dtype != torch.bfloat16:
        raise NotImplementedError(f"npu_chunk_gated_delta_rule: states of {initial_state.dtype}")
    out, states = torch.empty_like(value), torch.empty_like(initial_state)
    tensors = query, key, value, g, beta, initial_state, actual_seq_lengths, out, states
    launch("ChunkGatedDeltaRule", compute_prefills, *tensors, scale)
    return out, states


def compute_prefills(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    after: torch.Tensor,
    scale: float,
) -> None:
    """Go through each request token by token: what chunks compute at once, but for rounding."""
    first = 0
    for request, count in enumerate(lengths.tolist()):
        state = before[request].float()
        for token in range(first, first + count):
            state = follow(query[token], key[token], value[token], g[token], beta[token], state, scale, out[token])
        after[request] = state.to(after.dtype)
        first += count
