"""Dummy batches of vLLM's model runner: how large they may be, and how one is run. Read against 0.23.0 to 0.33.0."""

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


MAX_SAVED_BYTES = 1 << 28  # of states while a dummy batch runs: more than caches of chips hold


class Limits(NamedTuple):
    """How large a batch may be: new tokens, tokens of one request, requests, and blocks of the KV cache."""

    tokens: int
    length: int
    requests: int
    blocks: int
    block_size: int


def get_limits(runner: GPUModelRunner) -> Limits:
    """Return the limits of a model runner's dummy batches.

    Raises:
        DeclineError: if it is not the model runner whose dummy batches are known.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        raise DeclineError("the dummy batches of vLLM's second model runner are not known")
    return Limits(
        runner.max_num_tokens,
        runner.max_model_len,
        runner.scheduler_config.max_num_seqs,
        runner.kv_cache_config.num_blocks - 1,  # without block 0, which stands for none
        min(_get_block_size(table) for table in runner.input_batch.block_table.block_tables),
    )


def run_dummy(runner: GPUModelRunner, requests: int, tokens: int, context: int) -> None:
    """Run the model on a dummy batch of vLLM: equal requests with *tokens* new tokens after *context* cached ones.

    Nothing that requests are served from is changed: vLLM's dummy batches have no slots to write keys to, and states,
    which they would move on, are saved and restored. By themselves all their requests read one block, which is faster
    than blocks of their own and looks as if they shared a prefix; so each is given its own for the time of the run. As
    a decode of that many tokens, because only of these does vLLM let its caller choose the length.
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
    """Return how many of the *blocks* that dummy requests want to save: as many as fit, and at least one.

    The others take these in turn: what they compute means nothing.
    """
    block_bytes = sum(cache[0].numel() * cache.element_size() for cache in caches)
    return max(1, min(blocks, MAX_SAVED_BYTES // max(1, block_bytes)))


def run_without_attention(runner: GPUModelRunner, tokens: int) -> None:
    """Run the model on a dummy batch of *tokens* tokens, as vLLM does to profile memory: attention gives nothing."""
    runner._dummy_run(tokens, skip_eplb=True)


def _get_block_size(table: BlockTable) -> int:
    """Return the tokens of a block of the KV cache, which up to vLLM 0.30 is one or more blocks of the kernel."""
    return int(table.block_size * getattr(table, "blocks_per_kv_block", 1))
