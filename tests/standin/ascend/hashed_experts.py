"""The gate of DeepSeek V4's experts, which the first layers choose by the token itself."""

from __future__ import annotations

import torch
from standin_ascend.kernels import launch

SCHEMA = (  # vllm-ascend's own
    "moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None,"
    " int k_group=1, int group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, int group_select_mode=0,"
    " int renorm=0, int norm_type=0, bool out_flag=False, Tensor? bias_vl=None, int image_sentinel_lo=129257,"
    " int image_sentinel_count=5) -> (Tensor y, Tensor expert_idx, Tensor out)"
)
ROOT_OF_SOFTPLUS = 2  # norm type


def choose_experts(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    bias_vl: torch.Tensor | None = None,
    image_sentinel_lo: int = 129257,
    image_sentinel_count: int = 5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_gating_top_k_hash`: weights and numbers of experts [tokens, k] by logits *x* [tokens, experts].

    They are the best with a *bias*, or those of *tid2eid* [vocabulary, k] for the token; for tokens of images, which
    have the numbers from *image_sentinel_lo* on, the best with *bias_vl*.
    """
    modes = norm_type, k_group, group_count, renorm, out_flag
    is_told = tid2eid is not None or bias_vl is not None
    if modes != (ROOT_OF_SOFTPLUS, 1, 1, 0, False) or is_told != (input_ids is not None):
        raise NotImplementedError(f"moe_gating_top_k_hash: modes {modes}, or tokens without a table")
    weights, ids = torch.empty_like(x[:, :k]), x.new_empty(x.shape[0], k, dtype=torch.int32)
    options = routed_scaling_factor, eps
    images = range(image_sentinel_lo, image_sentinel_lo + image_sentinel_count)
    tensors = x, bias, bias_vl, input_ids, tid2eid, weights, ids
    launch("MoeGatingTopKHash", compute_choice, *tensors, images, *options)
    return weights, ids, x.new_empty(0, dtype=torch.float32)


def compute_choice(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    image_bias: torch.Tensor | None,
    tokens: torch.Tensor | None,
    table: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    images: range,
    factor: float,
    epsilon: float,
) -> None:
    """Weigh by the root of the softplus of the chosen logits, as shares of their sum, in float64."""
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    count = ids.shape[1]
    if tokens is not None and table is not None:
        chosen = table[tokens.long()].long()
    else:
        chosen = find_best(scores if bias is None else scores + bias.double(), count)
    if tokens is not None and image_bias is not None:
        is_image = (tokens >= images.start) & (tokens < images.stop)
        chosen = torch.where(is_image[:, None], find_best(scores + image_bias.double(), count), chosen)
    kept = scores.gather(1, chosen)
    weights.copy_(kept / (kept.sum(-1, keepdim=True) + epsilon) * factor)
    ids.copy_(chosen)


def find_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the largest scores in each row, the first of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
