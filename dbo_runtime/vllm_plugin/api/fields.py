"""Rules for slicing each field of the attention metadata and of the forward context, by name.

The names are those of vLLM 0.23.0 to 0.33.0. A version without a field has nothing to slice there.
"""

from __future__ import annotations

from typing import NamedTuple


class Fields(NamedTuple):
    """Rules for slicing the fields of the common attention metadata, by name.

    Attributes:
        split: fields that vLLM splits correctly, also inside a request. It keeps the batch's max_seq_len for every
            slice.
        per_request, per_token: arrays and lists that are sliced.
        dropped: caches that slices must not inherit.
        derived: fields that a platform derives from the others in each slice.
        unsupported: fields of features that cannot be split yet. A step in which one is set is not split.
    """

    split: tuple[str, ...]
    per_request: tuple[str, ...]
    per_token: tuple[str, ...]
    dropped: tuple[str, ...]
    derived: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def known(self) -> frozenset[str]:
        """Fields that may have one entry per request or token."""
        return frozenset((*self.split, *self.per_request, *self.per_token, *self.dropped, *self.derived))


FIELDS = Fields(
    split=(
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "block_table_tensor",
        "slot_mapping",
        "seq_lens_cpu_upper_bound",
        "_seq_lens_cpu",  # up to vLLM 0.28
    ),
    per_request=("is_prefilling", "causal", "req_idx", "rswa_prefix_lens", "replayssm_decode_base_cpu"),
    per_token=("positions",),
    # The last one exists up to vLLM 0.28. It is derived again from the lengths, because vLLM slices it wrongly in a
    # request.
    dropped=("_num_computed_tokens_cache", "_token_to_req_indices_cache", "_num_computed_tokens_cpu"),
    derived=(),
    # Cross attention, fast prefill, context parallelism, prefix-LM images.
    unsupported=("encoder_seq_lens", "num_logits_indices", "dcp_local_seq_lens", "mm_req_doc_ranges"),
)

SLICED_CONTEXT_TENSORS = ("is_padding",)
"""Tensors of the forward context that are sliced by token. Its dictionaries by layer are sliced, too."""
