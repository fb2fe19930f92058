"""How each field of the attention metadata and of the forward context is sliced, by its name.

Names of vLLM 0.23.0 to 0.33.0; a version without a field has nothing to slice there.
"""

from __future__ import annotations

from typing import NamedTuple


class Fields(NamedTuple):
    """How each field of the common attention metadata is sliced, by name.

    Attributes:
        split: those that vLLM splits correctly, also within a request. It leaves max_seq_len at that of the batch.
        per_request, per_token: arrays and lists that are sliced.
        dropped: caches that a slice must not inherit.
        derived: those that a platform derives from the others in each slice.
        unsupported: of features that cannot be split yet: a step in which one is set is not split.
    """

    split: tuple[str, ...]
    per_request: tuple[str, ...]
    per_token: tuple[str, ...]
    dropped: tuple[str, ...]
    derived: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def known(self) -> frozenset[str]:
        """Fields that may have an entry for each request or token."""
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
        "_seq_lens_cpu",  # up to 0.28
    ),
    per_request=("is_prefilling", "causal", "req_idx", "rswa_prefix_lens", "replayssm_decode_base_cpu"),
    per_token=("positions",),
    # The last one, up to 0.28, is derived from the lengths again; vLLM slices it wrongly within a request.
    dropped=("_num_computed_tokens_cache", "_token_to_req_indices_cache", "_num_computed_tokens_cpu"),
    derived=(),
    # Cross attention, fast prefill, context parallel, prefix-LM images.
    unsupported=("encoder_seq_lens", "num_logits_indices", "dcp_local_seq_lens", "mm_req_doc_ranges"),
)

SLICED_CONTEXT_TENSORS = ("is_padding",)
"""Tensors of the forward context that are sliced by token; its dictionaries by layer are sliced, too."""
