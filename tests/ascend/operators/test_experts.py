"""The choice of experts and the way of tokens to them and back, against Python's numbers and DeepSeek's modules."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.checks import (
    ANY_FORMAT,
    BEST,
    COUNTS,
    CUMULATED,
    FLOATS,
    HALF,
    SEEDS,
    SIGMOID,
    SOFTMAX,
    SUM_OF_TWO,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    npu,
    put,
)
from tests.support.ascend.operators.experts import (
    Routing,
    RoutingCase,
    choose,
    choose_plainly,
    make_cases,
    make_routings,
    multiply_groups,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT


@settings(max_examples=scale(60))
@given(seed=SEEDS, tokens=st.integers(0, 5), choice=make_cases(), biased=st.booleans(), scale=st.sampled_from([1, 2.5]))
@covers("_C_ascend::moe_gating_top_k")
def test_experts_are_chosen_within_the_best_groups(
    standin: StandIn, seed: int, tokens: int, choice: RoutingCase, biased: bool, scale: float
) -> None:
    generator, experts = make_generator(seed), choice.groups * choice.size
    logits = draw(generator, tokens, experts, dtype=torch.float32)
    bias = draw(generator, experts, dtype=torch.float32) if biased else None
    weights, ids, scores = choose(logits, choice, scale, bias)
    assert (weights.shape, ids.shape, ids.dtype) == ((tokens, choice.number), (tokens, choice.number), torch.int32)
    for row, found_ids, found in zip(logits.tolist(), ids.tolist(), weights.cpu(), strict=True):
        chosen, expected = choose_plainly(row, [0.0] * experts if bias is None else bias.tolist(), choice, scale)
        assert found_ids == chosen
        assert_near(found, torch.tensor(expected))
    assert_near(scores, logits.sigmoid() if choice.norm == SIGMOID else logits.softmax(-1))


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3)])
@covers("_C_ascend::moe_gating_top_k")
def test_experts_are_chosen_as_in_deepseek(standin: StandIn, groups: int, kept: int) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    generator, experts, number = make_generator(groups), 32, 6
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=experts,
            n_routed_experts=experts,
            n_group=groups,
            topk_group=kept,
            num_experts_per_tok=number,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )
    router.weight.copy_(torch.eye(experts))  # so that logits are what is routed
    router.e_score_correction_bias.copy_(draw(generator, experts, dtype=torch.float32))
    logits = draw(generator, 20, experts, dtype=torch.float32)
    _, expected, expected_ids = router(logits)
    choice = RoutingCase(groups, experts // groups, kept, number, SUM_OF_TWO, SIGMOID, 1)
    weights, ids, _ = choose(logits, choice, 2.5, router.e_score_correction_bias)
    found_order, expected_order = ids.cpu().argsort(-1), expected_ids.argsort(-1)
    assert_equal(ids.cpu().long().gather(1, found_order), expected_ids.gather(1, expected_order))
    assert_near(weights.cpu().gather(1, found_order), expected.gather(1, expected_order))


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
@pytest.mark.parametrize("norm", [SOFTMAX, SIGMOID])
@covers("_C_ascend::moe_gating_top_k")
def test_weights_of_experts_have_the_type_of_the_logits(standin: StandIn, norm: int, dtype: torch.dtype) -> None:
    logits = ((torch.randperm(16, generator=make_generator(0)) - 8) / 4).to(dtype)[None]  # of which no two are equal
    weights, ids, scores = choose(logits, RoutingCase(2, 8, 2, 4, BEST, norm, 0), 1.0, None)
    chosen, expected = choose_plainly(logits[0].tolist(), [0.0] * 16, RoutingCase(2, 8, 2, 4, BEST, norm, 0), 1.0)
    assert (weights.dtype, scores.dtype) == (dtype, torch.float32)
    assert ids.tolist() == [chosen]
    assert_near(weights[0], torch.tensor(expected))


@settings(max_examples=scale(50))
@given(routing=make_routings(), count_type=st.sampled_from([CUMULATED, COUNTS]))
@covers("npu::npu_moe_init_routing_v2")
def test_choices_of_a_ranks_experts_are_sorted_and_counted(standin: StandIn, routing: Routing, count_type: int) -> None:
    rows, places, counts, _ = routing.call(
        expert_tokens_num_type=count_type, active_expert_range=[routing.first, routing.last]
    )
    choices = routing.ids.shape[1]
    expected, expected_places = torch.zeros(routing.ids.numel(), 8, dtype=HALF), [-1] * routing.ids.numel()
    for place, (_, number) in enumerate(routing.sort()):
        expected[place] = routing.x[number // choices]
        expected_places[number] = place
    assert_equal(rows, expected)
    assert places.tolist() == expected_places
    assert counts.tolist() == (routing.count() if count_type == COUNTS else list(accumulate(routing.count())))
    _, sources, _, _ = routing.call(
        expert_tokens_num_type=COUNTS, active_expert_range=[routing.first, routing.last], row_idx_type=1
    )
    assert sources.tolist()[: len(routing.sort())] == [number for _, number in routing.sort()]


@covers("npu::npu_moe_init_routing_v2")
def test_without_a_range_all_experts_are_active(standin: StandIn) -> None:
    ids = torch.tensor([[2, 0], [1, 2], [0, 3]], dtype=torch.int32)
    routing = Routing(draw(make_generator(0), 3, 8), ids, 4, 0, 4)
    _, places, counts, _ = routing.call(expert_tokens_num_type=COUNTS)
    assert places.tolist() == [3, 0, 2, 4, 1, 5]
    assert counts.tolist() == [2, 1, 2, 1]


@settings(max_examples=scale(30))
@given(
    seed=SEEDS,
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rest=st.integers(0, 2),
    form=st.sampled_from(["stacked", "transposed", "list"]),
    group_list_type=st.sampled_from([CUMULATED, COUNTS]),
    dtype=FLOATS,
)
@covers("npu::npu_grouped_matmul")
def test_the_rows_of_each_expert_are_multiplied_by_its_matrix(
    standin: StandIn, seed: int, counts: list[int], rest: int, form: str, group_list_type: int, dtype: torch.dtype
) -> None:
    generator = make_generator(seed)
    x = draw(generator, sum(counts) + rest, 8, dtype=dtype)
    weight = draw(generator, len(counts), 8, 5, dtype=dtype)
    transposed = weight.transpose(1, 2).contiguous().transpose(1, 2)
    weights = {"stacked": [weight], "transposed": [transposed], "list": list(weight)}[form]
    groups = counts if group_list_type == COUNTS else list(accumulate(counts))
    found = multiply_groups(x, weights, groups, group_list_type)
    expected = np.zeros((len(x), 5))
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(owners):
        expected[row] = x[row].double().numpy() @ weight[expert].double().numpy()
    assert found.dtype == dtype
    assert_near(found, torch.from_numpy(expected))


@settings(max_examples=scale(30))
@given(seed=SEEDS, tokens=st.integers(1, 6), choices=st.integers(1, 4), dtype=FLOATS)
@covers("npu::npu_moe_token_permute", "npu::npu_moe_token_unpermute")
def test_permuted_tokens_are_in_the_order_of_experts_and_come_back(
    standin: StandIn, seed: int, tokens: int, choices: int, dtype: torch.dtype
) -> None:
    generator = make_generator(seed)
    x, probs = draw(generator, tokens, 8, dtype=dtype), torch.rand(tokens, choices, generator=generator).to(dtype)
    ids = torch.randint(5, (tokens, choices), generator=generator)
    rows, places = npu().npu_moe_token_permute(tokens=x.npu(), indices=ids.npu(), num_out_tokens=ids.numel())
    order = sorted(range(ids.numel()), key=lambda number: int(ids.flatten()[number]))  # which keeps equals in order
    assert_equal(rows, torch.stack([x[number // choices] for number in order]))
    assert [order[place] for place in places.tolist()] == list(range(ids.numel()))
    found = npu().npu_moe_token_unpermute(
        permuted_tokens=rows, sorted_indices=places, probs=probs.npu(), restore_shape=x.shape
    )
    assert found.dtype == dtype
    assert_near(found, x.float() * probs.float().sum(1, keepdim=True))


@covers("npu::npu_moe_token_unpermute")
def test_choices_of_weight_0_take_nothing_from_the_row_they_name(standin: StandIn) -> None:
    """Not even what is no number: vllm-ascend leaves rows of padding as memory was."""
    rows, probs = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0]]), torch.tensor([[0.5, 0.0]])
    found = npu().npu_moe_token_unpermute(*put(rows, torch.tensor([1, 0], dtype=torch.int32)), probs.npu())
    assert_equal(found, torch.tensor([[0.5, 1.0]]))


@pytest.mark.parametrize("rows", [1, 7])
@covers("npu::npu_moe_token_permute", "npu::npu_moe_token_unpermute")
def test_rows_with_one_expert_each_come_back_to_the_bit(standin: StandIn, rows: int) -> None:
    generator = make_generator(rows)
    x, ids = draw(generator, rows, 8), torch.randint(3, (rows,), generator=generator)
    permuted, places = npu().npu_moe_token_permute(*put(x, ids))
    assert_equal(npu().npu_moe_token_unpermute(permuted, places), x)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("choices", [1, 3])
@covers("npu::npu_moe_init_routing_v2", "npu::npu_grouped_matmul", "npu::npu_moe_token_unpermute")
def test_the_experts_of_all_ranks_together_give_what_deepseeks_give(
    standin: StandIn, choices: int, tokens: int
) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    generator = make_generator(tokens)
    config = DeepseekV3Config(hidden_size=8, n_routed_experts=6, moe_intermediate_size=4)
    experts = DeepseekV3Experts(config)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    x, probs = draw(generator, tokens, 8, dtype=torch.float32), torch.rand(tokens, choices, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:choices] for _ in range(tokens)]).int()
    found = torch.zeros(tokens, 8)
    for first, last in ((0, 2), (2, 6)):
        here = (ids >= first) & (ids < last)
        routing = Routing(x, ids, 6, first, last)
        rows, places, counts, _ = routing.call(expert_tokens_num_type=COUNTS, active_expert_range=[first, last])
        up, down = (weight[first:last].transpose(1, 2) for weight in (experts.gate_up_proj, experts.down_proj))
        gate, other = multiply_groups(rows.cpu(), [up], counts.tolist(), COUNTS).cpu().chunk(2, -1)
        done = multiply_groups(F.silu(gate) * other, [down], counts.tolist(), COUNTS)
        # vllm-ascend gives absolute values of places: weight 0 says that a choice is another rank's.
        found += npu().npu_moe_token_unpermute(done, places.abs(), (probs * here).npu()).cpu()
    assert_near(found, experts(x, ids.long(), probs))
