"""Data that a step reads and overwrites, saved so that the step can run a second time.

A cache written by slot has the same contents after a second run. A state of linear attention, or a ring of the latest
tokens, is read and then overwritten, so a second run would start from the contents that the first has left. So are
rows of a buffer that were received from the stage before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from dbo_runtime.vllm_plugin.api.kv_caches import SavedRows, changes_in_place, list_caches
from dbo_runtime.vllm_plugin.api.metadata import list_distinct
from dbo_runtime.vllm_plugin.api.metadata_source import MetadataSource, get_source

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

_BLOCKS_BEFORE = 1  # the host's lengths may be too long by a step's drafts, so a state may be one block earlier


class SavedStates:
    """Saves the contents of caches that a step's layers change in place, for the step's requests.

    Args:
        context: the step's forward context, before it runs. A dummy batch has nothing to save.
        received: tensors that hold what the stage before has sent, and that the step's layers may overwrite.
    """

    def __init__(self, context: ForwardContext, received: Iterable[torch.Tensor] = ()) -> None:
        self._received = [(tensor, tensor.clone()) for tensor in received]
        self._saved = [
            SavedRows(list_caches(context.no_compile_layers, source.layer_names), blocks)
            for source, blocks in _list_changed(context)
        ]

    def restore(self) -> None:
        """Write the saved contents back. Call this before each further run of the step."""
        for each in self._saved:
            each.restore()
        for tensor, saved in self._received:
            tensor.copy_(saved)


def _list_changed(context: ForwardContext) -> Iterator[tuple[MetadataSource, torch.Tensor]]:
    """Yield the source of each group of layers that change caches in place, with the changed blocks [blocks]."""
    if not isinstance(context.attn_metadata, dict):
        return
    for metadata in list_distinct(context.attn_metadata.values()):
        source = get_source(metadata)
        if source is not None and changes_in_place(source.builder.kv_cache_spec):
            yield source, _list_blocks(source)


def _list_blocks(source: MetadataSource) -> torch.Tensor:
    """Return the blocks that a step may change [blocks]: from each request's first token's block to its last blocks.

    Speculative states of a request are in the blocks after the one of its last token.
    """
    common, spec = source.common, source.builder.kv_cache_spec
    requests, size = common.num_reqs, spec.block_size
    ends = common.seq_lens_cpu_upper_bound[:requests]
    starts = ends - common.query_start_loc_cpu[: requests + 1].diff()
    table = common.block_table_tensor[:requests]
    columns, last = torch.arange(table.shape[1]), table.shape[1] - 1
    first_column = (starts // size - _BLOCKS_BEFORE).clamp(0, last)
    last_column = ((ends - 1) // size + getattr(spec, "num_speculative_blocks", 0)).clamp(0, last)
    is_changed = (columns >= first_column[:, None]) & (columns <= last_column[:, None])
    blocks: torch.Tensor = table[is_changed.to(table.device)].unique().long()
    return blocks
