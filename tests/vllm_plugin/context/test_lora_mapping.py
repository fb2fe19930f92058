"""The adapters of a micro-batch are those of its tokens, by vLLM's own punica wrapper for CPU."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.context.lora_mapping import LoraMapping, make_lora_mapping

pytestmark = pytest.mark.vllm

SLOTS, SIZE, RANK = 3, 4, 2
WEIGHTS = torch.Generator().manual_seed(0)
A = torch.randn(SLOTS, 1, RANK, SIZE, generator=WEIGHTS)
B = torch.randn(SLOTS, 1, SIZE, RANK, generator=WEIGHTS)


def make_wrapper(adapters: list[int], is_prefill: bool = True) -> Any:
    """Return vLLM's wrapper for a batch whose tokens have these adapters, by their ids; 0 is none."""
    from vllm.lora.layers import LoRAMapping as Mapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(max_num_batched_tokens=64, max_batches=64, device="cpu")
    mapping = Mapping(tuple(adapters), tuple(adapters), is_prefill=is_prefill)
    wrapper.update_metadata(mapping, [1, 2, None], SLOTS + 1, 320)
    return wrapper


def apply(wrapper: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what a layer adds for *x* [tokens, size], whose tokens have the adapters of the wrapper."""
    y = torch.zeros(len(x), SIZE)
    wrapper.add_lora_linear(y, x, (A,), (B,), 1.0, (SIZE,))
    return y


def cut(*edges: int) -> list[BatchSlice]:
    return [BatchSlice(0, 1, left, right) for left, right in pairwise(edges)]


@given(
    st.lists(st.sampled_from([1, 2]), min_size=2, max_size=24),
    st.sets(st.integers(1, 23), max_size=4),
    st.booleans(),
)
def test_each_token_has_the_adapter_that_it_has_in_the_whole_batch(
    adapters: list[int], cuts: set[int], is_prefill: bool
) -> None:
    wrapper, count = make_wrapper(adapters, is_prefill), len(adapters)
    x = torch.randn(count, SIZE)
    expected = torch.stack([B[one - 1, 0] @ (A[one - 1, 0] @ row) for one, row in zip(adapters, x, strict=True)])
    state = dict(vars(wrapper))
    slices = cut(0, *sorted(offset for offset in cuts if offset < count), count)
    with LoraMapping(wrapper).split(slices) as select:
        for number in reversed(range(len(slices))):
            select(number)
            piece = slices[number].tokens
            torch.testing.assert_close(apply(wrapper, x[piece]), expected[piece])
            assert wrapper.sampler_indices.tolist() == state["_sampler_indices"][:count].tolist()
    assert vars(wrapper) == state
    torch.testing.assert_close(apply(wrapper, x), expected)


def test_a_micro_batch_without_adapters_adds_nothing_beside_one_with_them() -> None:
    wrapper = make_wrapper([1, 1, 0, 0])
    with LoraMapping(wrapper).split(cut(0, 2, 4)) as select:
        assert apply(wrapper, torch.ones(2, SIZE)).all(), "the first one is selected"
        select(1)
        assert wrapper.no_lora
        assert not apply(wrapper, torch.ones(2, SIZE)).any()


def test_the_mapping_of_the_step_is_back_after_an_error() -> None:
    wrapper = make_wrapper([1, 2, 2])

    def fail() -> None:
        with LoraMapping(wrapper).split(cut(0, 1, 3)) as select:
            select(1)
            raise RuntimeError("an op")

    with pytest.raises(RuntimeError, match="an op"):
        fail()
    assert wrapper.token_lora_indices.tolist() == [0, 1, 1]


@pytest.mark.parametrize(("tokens", "detail"), [(3, None), (4, "3 tokens are mapped, 4 are run")])
def test_a_step_whose_tokens_are_not_those_that_are_mapped_is_declined(tokens: int, detail: str | None) -> None:
    expected = None if detail is None else Decline("LoRA mapping of another batch", detail)
    assert LoraMapping(make_wrapper([1, 2, 2])).check(tokens) == expected


def make_model(*wrappers: Any) -> torch.nn.Module:
    from vllm.lora.layers import BaseLayerWithLoRA

    model = torch.nn.Module()
    for number, wrapper in enumerate(wrappers):
        layer = BaseLayerWithLoRA()
        layer.punica_wrapper = wrapper
        model.add_module(str(number), layer)
    return model


def test_the_mapping_is_the_one_that_all_layers_read() -> None:
    wrapper = make_wrapper([1, 2])
    mapping = make_lora_mapping(make_model(wrapper, wrapper))
    assert isinstance(mapping, LoraMapping)
    assert mapping.check(2) is None
    assert make_lora_mapping(make_model()) is None


def test_a_model_whose_mapping_is_not_known_is_declined() -> None:
    wrapper = make_wrapper([1, 2])
    several = make_lora_mapping(make_model(wrapper, copy.copy(wrapper)))
    assert several == Decline("layers of the model read several LoRA mappings", "2 of them")
    other = copy.copy(wrapper)
    other.__class__ = type("PunicaWrapperOther", (type(wrapper),), {})
    assert make_lora_mapping(make_model(other)) == Decline(
        "the LoRA mapping of this platform is not known", "PunicaWrapperOther"
    )
