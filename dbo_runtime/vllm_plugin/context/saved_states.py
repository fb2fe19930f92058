"""What a step changes and does not only write, saved so that the step can run a second time.

A cache that is written by slot holds the same after a second run. A state of linear attention, or a ring of the latest
tokens, is read and then overwritten: a second run would begin with what the first has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dbo_runtime.vllm_plugin.api.kv_caches import SavedRows, changes_in_place, list_caches
from dbo_runtime.vllm_plugin.api.metadata import list_distinct
from dbo_runtime.vllm_plugin.api.metadata_source import MetadataSource, get_source

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

_BLOCKS_BEFORE = 1  # lengths on the host may be too long by the drafts of a step, so a state may be a block before


class SavedStates:
    """Holds what the requests of a step have in caches that its layers change in place.

    Args:
        context: the forward context of the step, before it runs. A dummy batch has nothing to save.
    """

    def __init__(self, context: ForwardContext) -> None:
        self._saved = [
            SavedRows(list_caches(context.no_compile_layers, source.layer_names), blocks)
            for source, blocks in _list_changed(context)
        ]

    def restore(self) -> None:
        """Let the caches hold that again. Call it before each further run of the step."""
        for each in self._saved:
            each.restore()


def _list_changed(context: ForwardContext) -> Iterator[tuple[MetadataSource, torch.Tensor]]:
    """Yield the source of each group of layers that change caches in place, with the blocks they change [blocks]."""
    if not isinstance(context.attn_metadata, dict):
        return
    for metadata in list_distinct(context.attn_metadata.values()):
        source = get_source(metadata)
        if source is not None and changes_in_place(source.builder.kv_cache_spec):
            yield source, _list_blocks(source)


def _list_blocks(source: MetadataSource) -> torch.Tensor:
    """Return the blocks that a step may change [blocks]: from that of each request's first token to its last ones.

    What a request speculates on is in the blocks after that of its last token.
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
