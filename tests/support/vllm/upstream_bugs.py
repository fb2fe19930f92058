"""Jobs that look for the bugs of vLLM's CPU build and patch them, each in a process of its own: patches stay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.v1.sample import rejection_sampler as sampler
from vllm.v1.spec_decode import utils as drafts
from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

from dbo_runtime.vllm_plugin.install.cpu_patches import UPSTREAM_BUGS, apply_patches


class Bare(Experts):
    w1_bias = w2_bias = None

    def __init__(self) -> None:
        self._use_zentorch = False


def refuses(method: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return what a method raises for these arguments; nothing, if it takes them."""
    try:
        method(*arguments, **options)
    except (NotImplementedError, AssertionError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""


def check_each_bug(rank: int) -> None:
    """Show each bug's symptom, patch them all, and show that the symptoms are gone."""
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(4, 32), torch.randn(2, 64, 32), torch.randn(2, 32, 32)
    w1, w2 = (cpu_prepack_moe_weight(w, "vec") for w in (w1, w2))

    def run(ids, expert_map):
        out = torch.empty_like(x)
        Bare().apply(
            output=out,
            hidden_states=x,
            w1=w1,
            w2=w2,
            topk_weights=torch.ones(4, 1),
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=2,
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=None,
            workspace2=None,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return out

    first, second = (torch.full((4, 1), expert, dtype=torch.int32) for expert in (0, 1))
    swapped, elsewhere = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32)

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    handed = make_empty_intermediate_tensors_factory(["hidden_states", "residual"], 4)
    off = SimpleNamespace(enable_sp=False)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1), compilation_config=SimpleNamespace(pass_config=off)
    )
    stage = SimpleNamespace(
        intermediate_tensors=None,
        vllm_config=config,
        model=SimpleNamespace(make_empty_intermediate_tensors=handed),
        max_num_tokens=8,
        model_config=SimpleNamespace(dtype=torch.float32),
        device=torch.device("cpu"),
    )
    Runner._postprocess_triton(stage)  # as each runner does when it is made: then kernels are what vLLM makes them
    ends = torch.tensor([2, 5], dtype=torch.int32)  # of the drafts of two requests

    def repeat(*values):
        return sampler.expand_batch_to_tokens(torch.tensor(values), ends, 5, replace_from=0, replace_to=1)

    def verify(targets):
        verified = torch.full((2, 4), -1, dtype=torch.int32)
        ids, bonus = torch.tensor([7, 8, 9, 10, 11], dtype=torch.int32), torch.tensor([3, 4])
        sampler._rejection_greedy_sample(verified, ends, ids, torch.tensor(targets), bonus, None, 3, None, None)
        return verified.tolist()

    def verify_random(probabilities):
        verified = torch.full((1, 2), -1, dtype=torch.int32)
        sampler._rejection_random_sample(
            verified,
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([2], dtype=torch.int32),
            None,
            torch.tensor([probabilities]),
            torch.tensor([3]),
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([0.5], dtype=torch.float64),
            torch.tensor([False]),
            1,
            None,
        )
        return verified.tolist()

    def recover():
        found = torch.empty(1, dtype=torch.int32)
        one, noise, target = torch.tensor([1], dtype=torch.int32), torch.ones(1, 4), torch.tensor([[0, 0.3, 0.6, 0.1]])
        sampler._sample_recovered_tokens(found, one, one * 2, None, target, noise, max_spec_len=1)
        return found.tolist()

    def advance():
        table, lens = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32), torch.tensor([4, 16], dtype=torch.int32)
        places, slots = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        drafts.eagle_step_update_slot_mapping_and_metadata(torch.tensor([3, 15]), table, lens, 16, 32, places, slots)
        return places.tolist(), slots.tolist(), lens.tolist()

    def expand():
        x, weights, ids = torch.ones(3, 2), torch.arange(6.0).view(3, 1, 2), torch.tensor([1, -1, 0])
        decodes, prefills, slices = torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3, 2)
        punica_cpu.bgmv_expand(x, weights, decodes, ids)
        punica_cpu.sgmv_expand(x, weights, prefills, None, torch.ones(3, dtype=torch.long), ids, 3, 1, 3, True)
        punica_cpu.bgmv_expand_slice(x, weights, slices, ids, 1, 1)
        assert decodes.tolist() == prefills.tolist() == slices[:, 1:].tolist()
        assert not slices[:, 0].any()
        return decodes[:, 0].tolist()

    communicator = CpuCommunicator.__new__(CpuCommunicator)
    communicator.world_size, communicator.device_group = 1, dist.group.WORLD

    # As vLLM is: all gaps are found, and their symptoms are there.
    assert [bug.is_present() for bug in UPSTREAM_BUGS] == [True] * len(UPSTREAM_BUGS), "vLLM has fixed one: remove it"
    plain, other = run(first, None), run(second, None)
    assert not torch.equal(plain, other)
    assert torch.equal(run(first, swapped), plain), "vLLM reads expert_map now: remove this gap"
    assert refuses(communicator.all_gatherv, x, dim=0, sizes=[4]), "vLLM has all_gatherv now: remove this gap"
    assert refuses(communicator.reduce_scatterv, x, dim=0, sizes=[4]), "vLLM has reduce_scatterv now: remove this gap"

    assert refuses(Runner.sync_and_gather_intermediate_tensors, stage, 2, None, False), (
        "vLLM makes buffers: remove this"
    )
    for call in (
        lambda: repeat(0.0, 2.0),
        lambda: verify([7] * 5),
        lambda: verify_random([0.25] * 4),
        recover,
        advance,
    ):
        assert refuses(call), "vLLM has kernels for CPU here: remove this gap"
    assert expand() == [5.0, 9.0, 1.0], "vLLM skips tokens without adapters now: remove this"

    # Patched, once.
    assert apply_patches() == ([bug.symptom for bug in UPSTREAM_BUGS], {})
    assert [bug.is_present() for bug in UPSTREAM_BUGS] == [False] * len(UPSTREAM_BUGS)
    assert apply_patches() == ([], {})
    assert torch.equal(run(first, swapped), other)
    assert torch.equal(run(first, None), plain)
    assert torch.equal(run(first, elsewhere), torch.zeros_like(x)), "an expert on another rank gives nothing here"
    assert torch.equal(run(second, elsewhere), plain)
    one, two = communicator.all_gatherv([x, x + 1], dim=0, sizes=[4])
    assert torch.equal(one, x)
    assert torch.equal(two, x + 1)
    assert torch.equal(communicator.all_gatherv(x), x)
    assert torch.equal(communicator.reduce_scatterv(x, dim=0), x)
    received = Runner.sync_and_gather_intermediate_tensors(stage, 2, None, False)
    assert received["residual"].shape == (2, 4)
    assert received["residual"].dtype == torch.float32
    assert stage.intermediate_tensors["residual"].shape == (8, 4), "as large as any step, and made once"
    assert repeat(0.0, 2.0).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert repeat(0, 7).tolist() == [1, 1, 7, 7, 7]
    assert verify([7, 8, 9, 0, 11]) == [[7, 8, 3, -1], [9, 0, -1, -1]], (
        "all accepted and one more; rejected at the second"
    )
    assert verify_random([0.1, 0.1, 0.6, 0.2]) == [[2, 3]], "0.6 is above 0.5"
    assert verify_random([0.4, 0.1, 0.4, 0.1]) == [[1, -1]]
    assert recover() == [1], "the most probable but the rejected one"
    assert advance() == ([4, 16], [5 * 16 + 4, 8 * 16], [5, 17])
    assert expand() == [5.0, 0.0, 1.0]
    assert "along dimension 0 only" in refuses(communicator.all_gatherv, x, dim=1)


def check_this_version(rank: int, version: str) -> None:
    """Find the bugs that were seen in this version of vLLM, and no others, and patch them."""
    present = [bug.symptom for bug in UPSTREAM_BUGS if bug.is_present()]
    known = [bug.symptom for bug in UPSTREAM_BUGS if version in bug.versions]
    assert present == known, (present, known)
    assert apply_patches() == (present, {})
    assert apply_patches() == ([], {})
