"""How experts are chosen, tokens routed to them, and multiplied by their matrices: calls and plain references."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.ascend.operators.checks import (
    BEST,
    SEEDS,
    SIGMOID,
    SOFTMAX,
    SUM_OF_TWO,
    Tensors,
    draw,
    make_generator,
    npu,
    put,
)


class RoutingCase(NamedTuple):
    """How experts are chosen."""

    groups: int
    size: int
    kept: int
    number: int
    select: int
    norm: int
    renorm: int


def make_cases() -> st.SearchStrategy[RoutingCase]:
    """Return choices that make sense: no more experts than the kept groups have."""
    groups = st.integers(1, 4).flatmap(lambda groups: st.tuples(st.just(groups), st.integers(1, groups)))
    return st.tuples(groups, st.integers(2, 4)).flatmap(
        lambda drawn: st.builds(
            RoutingCase,
            groups=st.just(drawn[0][0]),
            size=st.just(drawn[1]),
            kept=st.just(drawn[0][1]),
            number=st.integers(1, drawn[0][1] * drawn[1]),
            select=st.sampled_from([BEST, SUM_OF_TWO]),
            norm=st.sampled_from([SOFTMAX, SIGMOID]),
            renorm=st.integers(0, 1),
        )
    )


def choose(logits: torch.Tensor, choice: RoutingCase, scale: float, bias: torch.Tensor | None) -> Any:
    """Call the operator."""
    return torch.ops._C_ascend.moe_gating_top_k(
        logits.npu(),
        k=choice.number,
        k_group=choice.kept,
        group_count=choice.groups,
        group_select_mode=choice.select,
        renorm=choice.renorm,
        norm_type=choice.norm,
        out_flag=False,
        routed_scaling_factor=scale,
        eps=1e-20,
        bias_opt=None if bias is None else bias.npu(),
    )


def choose_plainly(
    row: list[float], bias: list[float], choice: RoutingCase, scale: float
) -> tuple[list[int], list[float]]:
    """Choose experts of one token, with Python's numbers."""
    exponentials = np.exp(np.array(row))
    scores = exponentials / (1 + exponentials if choice.norm == SIGMOID else exponentials.sum())
    rated = [float(score) + added for score, added in zip(scores, bias, strict=True)]
    members = [range(first, first + choice.size) for first in range(0, len(row), choice.size)]

    def rate(group: range) -> float:
        best = sorted((rated[expert] for expert in group), reverse=True)
        return sum(best[:2]) if choice.select == SUM_OF_TWO else best[0]

    kept = [expert for group in sorted(members, key=rate, reverse=True)[: choice.kept] for expert in group]
    chosen = sorted(kept, key=lambda expert: rated[expert], reverse=True)[: choice.number]
    # CANN's sigmoid is normed always: see `needRenorm` in vllm-ascend's csrc/moe/moe_gating_top_k.
    whole = sum(scores[expert] for expert in chosen) if choice.norm == SIGMOID or choice.renorm else 1.0
    return chosen, [float(scores[expert] / whole * scale) for expert in chosen]


class Routing(NamedTuple):
    """Tokens and their experts, of which one rank has a range."""

    x: torch.Tensor
    ids: torch.Tensor
    experts: int
    first: int
    last: int

    def sort(self) -> list[tuple[int, int]]:
        """Return the expert and the number of each choice that is of this rank, in the order of the experts."""
        return sorted(
            (expert, number)
            for number, expert in enumerate(self.ids.flatten().tolist())
            if self.first <= expert < self.last
        )

    def count(self) -> list[int]:
        """Return how many choices each expert of this rank has."""
        return [sum(expert == each for each, _ in self.sort()) for expert in range(self.first, self.last)]

    def call(self, **more: Any) -> Any:
        """Call the operator."""
        return npu().npu_moe_init_routing_v2(
            *put(self.x, self.ids),
            expert_num=self.experts,
            active_num=self.ids.numel(),
            expert_tokens_num_flag=True,
            **{"quant_mode": -1, **more},
        )


@st.composite
def make_routings(draw_from: st.DrawFn) -> Routing:
    """Draw tokens, and a range of experts, which may be all."""
    experts = draw_from(st.integers(1, 8))
    first = draw_from(st.integers(0, experts - 1))
    last = draw_from(st.integers(first + 1, experts))
    generator = make_generator(draw_from(SEEDS))
    tokens, number = draw_from(st.integers(0, 6)), draw_from(st.integers(1, 4))
    ids = torch.randint(experts, (tokens, number), generator=generator, dtype=torch.int32)
    return Routing(draw(generator, tokens, 8), ids, experts, first, last)


def multiply_groups(x: torch.Tensor, weights: Tensors, groups: list[int], group_list_type: int) -> torch.Tensor:
    """Call the operator."""
    (out,) = npu().npu_grouped_matmul(
        x=put(x),
        weight=put(*weights),
        bias=None,
        split_item=2,
        group_type=0,
        group_list_type=group_list_type,
        group_list=torch.tensor(groups).npu(),
    )
    return out
