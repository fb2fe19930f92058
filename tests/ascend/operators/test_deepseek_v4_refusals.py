"""What the operators of DeepSeek V4 on the stand-in do not compute, they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators import deepseek_v4 as v4
from tests.support.ascend.operators.checks import ANY_FORMAT, draw, make_generator, put

pytestmark = ANY_FORMAT

CALLS: dict[str, tuple[Any, Any]] = {  # what makes an operator's tensors, and what calls it with other options
    "rotation": (v4.make_rotation, v4.rotate_in_place),
    "compressor": (
        lambda g: [*v4.make_compressor(g, 8, 3), v4.TABLE, v4.EDGES, v4.STARTS],
        v4.compress,
    ),
    "attention": (v4.make_attention, v4.attend),
    "choice": (v4.make_choice, v4.choose),
    "gate": (lambda g: [draw(g, 5, 6, dtype=torch.float32), draw(g, 6, dtype=torch.float32)], v4.route),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rotation", {"rotary_mode": "half"}),
        ("rotation", {"partial_slice": [0, 4]}),
        ("compressor", {"rotary_mode": 1}),
        ("compressor", {"cache_mode": 2}),
        ("compressor", {"coff": 3}),
        ("compressor", {"rope_head_dim": 2}),
        ("attention", {"layout_q": "BSND"}),
        ("attention", {"layout_kv": "BSND"}),
        ("attention", {"ori_mask_mode": 0}),
        ("attention", {"cmp_mask_mode": 0}),
        ("attention", {"ori_win_right": 1}),
        ("attention", {"cmp_ratio": 8}),
        ("attention", {"return_softmax_lse": True}),
        ("choice", {"quant_mode": 1}),
        ("choice", {"layout_k": "TND"}),
        ("choice", {"mask_mode": 0}),
        ("choice", {"return_value": 1}),
        ("gate", {"norm_type": 1}),
        ("gate", {"renorm": 1}),
        ("gate", {"group_count": 2}),
        ("gate", {"out_flag": True}),
    ],
)
def test_other_options_are_refused(standin: StandIn, name: str, options: dict[str, Any]) -> None:
    make, call = CALLS[name]
    there = put(*make(make_generator(0)))
    call(*there)
    with pytest.raises(NotImplementedError):
        call(*there, **options)


def test_other_forms_are_refused(standin: StandIn) -> None:
    g = make_generator(0)
    x, gamma = put(*v4.make_norm(g))
    streams = put(*v4.make_streams(g, 5, 8))
    places = put(draw(g, 12, 4), draw(g, 12, 4), v4.EDGES, v4.STARTS, v4.TABLE)
    indices = v4.attend, put(*v4.make_attention(g)), {"ori_sparse_indices": x.int()}
    with pytest.raises(NotImplementedError):  # explicit keys of drafts
        indices[0](*indices[1], **indices[2])
    with pytest.raises(NotImplementedError):
        torch.ops._C_ascend.npu_rms_norm_dynamic_quant(x, gamma, smooth_scale=gamma)
    with pytest.raises(NotImplementedError):
        torch.ops._C_ascend.npu_hc_pre_v2(*streams, 2, 20, 1e-6, 1e-5)
    with pytest.raises(NotImplementedError):  # slots in one number
        torch.ops._C_ascend.compressor_metadata(*places, 2, 1, 4, 5, 2)
    with pytest.raises(NotImplementedError):
        torch.div(x, 2, rounding_mode="floor", out=x.float())
