"""CPU kernels for speculative decoding, for dispatchers that vLLM's CPU runner leaves on Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def find_triton_dispatchers() -> dict[Any, Callable[..., None]]:
    """Return the dispatchers that still launch a Triton kernel, each with an equivalent function for the CPU.

    vLLM 0.30.0's `CPUModelRunner._postprocess_triton` sets the kernels under the names they had before dispatchers were
    introduced. Nothing reads those names.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils import cpu_triton_utils as cpu
    from vllm.v1.sample import rejection_sampler as sampler
    from vllm.v1.spec_decode import utils

    if HAS_TRITON or not (hasattr(sampler, "_rejection_greedy_sample") and hasattr(cpu, "_FuncWrapper")):
        return {}  # earlier and later versions have no such dispatchers
    kernels: dict[Any, Callable[..., None]] = {
        sampler._rejection_greedy_sample: cpu._rejection_greedy_sample_kernel_impl,
        sampler._rejection_random_sample: cpu._rejection_random_sample_kernel_impl,
        sampler._sample_recovered_tokens: cpu._sample_recovered_tokens_kernel_impl,
        sampler._expand: expand,
        utils._eagle_step_slot_mapping_metadata: advance_drafts,
    }
    return {dispatcher: fn for dispatcher, fn in kernels.items() if type(dispatcher.kernel) is not cpu._FuncWrapper}


def set_cpu_kernels() -> None:
    """Make these dispatchers call the CPU functions."""
    from vllm.utils import cpu_triton_utils as cpu

    for dispatcher, function in find_triton_dispatchers().items():
        dispatcher.kernel = cpu._FuncWrapper(function)


def expand(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    **_: object,
) -> None:
    """Repeat each request's value [requests] for its tokens -> *output* [tokens], with one value replaced.

    vLLM's own CPU function has another name for *input*, and converts floats to a copy that it then drops.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input == replace_from, torch.as_tensor(replace_to, dtype=input.dtype), input)
    output.copy_(values.repeat_interleave(counts))


def advance_drafts(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    seq_lens: torch.Tensor,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
    batch_size: int,
) -> None:
    """Advance each request by one drafted token: positions, KV cache slots and lengths, each [requests].

    vLLM's own CPU function has another name for the stride.
    """
    from vllm.utils.cpu_triton_utils import _eagle_step_slot_mapping_metadata_kernel_impl as advance

    given = positions, block_table, block_table_stride, seq_lens, out_clamped_positions, out_slot_mapping
    advance(*given, block_size, max_model_len, n_blocks_per_req, PAD_ID, batch_size)
