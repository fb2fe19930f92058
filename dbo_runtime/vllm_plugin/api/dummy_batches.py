"""Dummy batches of vLLM's model runner: their limits, and how to run one. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from dbo_runtime.decline import DeclineError
from dbo_runtime.vllm_plugin.api.kv_caches import SavedRows, changes_in_place, list_caches
from dbo_runtime.vllm_plugin.api.metadata import has_cache

if TYPE_CHECKING:
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


MAX_SAVED_BYTES = 1 << 28  # limit for states saved around a dummy batch; larger than any chip's caches


class Limits(NamedTuple):
    """The limits of a batch: new tokens, tokens of one request, requests, and blocks of the KV cache."""

    tokens: int
    length: int
    requests: int
    blocks: int
    block_size: int


def get_limits(runner: GPUModelRunner) -> Limits:
    """Return the limits of a model runner's dummy batches.

    Raises:
        DeclineError: this is not the model runner whose dummy batches are known.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        raise DeclineError("the dummy batches of vLLM's second model runner are not known")
    return Limits(
        runner.max_num_tokens,
        runner.max_model_len,
        runner.scheduler_config.max_num_seqs,
        runner.kv_cache_config.num_blocks - 1,  # without block 0, which means "no block"
        min(_get_block_size(table) for table in runner.input_batch.block_table.block_tables),
    )


def run_dummy(runner: GPUModelRunner, requests: int, tokens: int, context: int) -> None:
    """Run the model on a dummy batch: equal requests with *tokens* new tokens each, after *context* cached tokens.

    The data of served requests stay unchanged. vLLM's dummy batches have no slots to write keys to. They would advance
    states, so states are saved and restored. By default all dummy requests read one block, which is faster than
    separate blocks and looks like a shared prefix, so each request gets its own blocks during the run. The batch runs
    as a decode of *tokens* tokens, because vLLM lets its caller choose the length only for decodes.
    """
    from vllm.config import CUDAGraphMode

    groups = [group for group in runner.kv_cache_config.kv_cache_groups if has_cache(group.kv_cache_spec)]
    tables = runner.input_batch.block_table.block_tables
    kept = [(t.block_table.np[:requests].copy(), t.num_blocks_per_row[:requests].copy()) for t in tables]
    decode_len = runner.uniform_decode_query_len
    states: list[SavedRows] = []
    try:
        for table, group in zip(tables, groups, strict=True):
            blocks = -(-(context + tokens) // _get_block_size(table))
            distinct = requests * blocks
            if changes_in_place(group.kv_cache_spec):
                caches = list_caches(runner.compilation_config.static_forward_context, group.layer_names)
                distinct = _choose_saved(caches, distinct)
                states.append(SavedRows(caches, torch.arange(1, 1 + distinct, device=caches[0].device)))
            for request in range(requests):
                table.add_row([1 + (request * blocks + block) % distinct for block in range(blocks)], request)
        runner.uniform_decode_query_len = tokens
        runner._dummy_run(
            requests * tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            force_attention=True,
            uniform_decode=True,
            allow_microbatching=False,
            skip_eplb=True,
            profile_seq_lens=context + tokens,
        )
    finally:
        runner.uniform_decode_query_len = decode_len
        for table, (rows, counts) in zip(tables, kept, strict=True):
            table.block_table.np[:requests], table.num_blocks_per_row[:requests] = rows, counts
        for saved in states:
            saved.restore()


def _choose_saved(caches: Sequence[torch.Tensor], blocks: int) -> int:
    """Return how many of the *blocks* for dummy requests to save: as many as fit, and at least one.

    The other requests reuse these blocks in turn, because their results do not matter.
    """
    block_bytes = sum(cache[0].numel() * cache.element_size() for cache in caches)
    return max(1, min(blocks, MAX_SAVED_BYTES // max(1, block_bytes)))


def run_without_attention(runner: GPUModelRunner, tokens: int) -> None:
    """Run the model on a dummy batch of *tokens* tokens without attention, as vLLM does to profile memory."""
    runner._dummy_run(tokens, skip_eplb=True)


def _get_block_size(table: BlockTable) -> int:
    """Return the tokens per block of the KV cache. Up to vLLM 0.30 a block is one or more blocks of the kernel."""
    return int(table.block_size * getattr(table, "blocks_per_kv_block", 1))
