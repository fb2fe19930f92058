"""Decomposed MoE layers: which can be, why others cannot, and the program that follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import override_forward_context

from dbo_models.deepseek import DeepseekAdapter
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.decline import DeclineError
from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.oracle.ranks import RankPlan, validate_ranks
from dbo_runtime.vllm_plugin.api.moe import MoeLayer
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.parallel.experts import SequenceParallelExperts, SplitExperts
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from tests.support.vllm.engine import Engine

CPU, NPU = get_platform("cpu"), get_platform("npu")
ONE = SimpleNamespace(world_size=1)
TWO = SimpleNamespace(world_size=2, rank_in_group=1)
FOUR = SimpleNamespace(world_size=4, rank_in_group=3)


class MoEPrepareAndFinalizeNaiveDPEPModular:
    """Goes by the name of vLLM's dispatch that gathers."""


class DeepEPHTPrepareAndFinalize:
    """Goes by the name of one that keeps state."""


class MoERunner(SimpleNamespace):
    """Goes by the name of vLLM's runner."""


class DerivedRunner(MoERunner):
    """Looks like it and may do anything."""


class UnquantizedFusedMoEMethod(SimpleNamespace):
    """Goes by the name of what applies unquantized weights."""


class DeepseekV2MoE(SimpleNamespace):
    """Goes by the name of DeepSeek's mixture of experts."""


def make_runner(prepare: Any = MoEPrepareAndFinalizeNaiveDPEPModular, **changes: Any) -> MoERunner:
    """Return the part of an MoE runner that is looked at: under data parallel, unquantized, with a gate."""
    experts = SimpleNamespace(quant_config=SimpleNamespace(quant_dtype=None), expects_unquantized_inputs=False)
    kernel = SimpleNamespace(impl=SimpleNamespace(prepare_finalize=prepare(), fused_experts=experts))
    runner = MoERunner(
        moe_config=SimpleNamespace(
            dp_size=2, hidden_dim=8, hidden_dim_unpadded=8, is_sequence_parallel=False, skip_final_all_reduce=False
        ),
        routed_experts=SimpleNamespace(
            quant_method=UnquantizedFusedMoEMethod(moe_kernel=kernel),
            apply_router_weight_on_input=False,
            expert_map=torch.tensor([0, 1, -1, -1]),
        ),
        router=SimpleNamespace(),
        gate=object(),
        shared_experts=object(),
        routed_input_transform=None,
        routed_output_transform=None,
        _fse_fuse_gate=False,
        _fused_output_is_reduced=False,
    )
    owners = (runner, runner.moe_config, runner.routed_experts, experts, experts.quant_config)
    for name, value in changes.items():
        next(owner for owner in owners if hasattr(owner, name)).__dict__[name] = value
    return runner


class ZeroExpertRouter:
    """Goes by the name of a router that adds to the result."""


def test_a_plain_layer_can_be_decomposed() -> None:
    assert CPU.get_moe_layer(make_runner()).needs_dispatch
    assert CPU.get_moe_layer(make_runner()).check() is None
    assert CPU.get_moe_layer(make_runner(quant_dtype=torch.int8, expects_unquantized_inputs=True)).check() is None


def test_a_kernel_that_reduces_its_own_output_cannot_be_decomposed() -> None:
    with pytest.raises(DeclineError, match="the MoE kernel reduces its own output"):
        CPU.get_moe_layer(make_runner(_fused_output_is_reduced=True))


OTHER_METHOD = SimpleNamespace(moe_kernel=make_runner().routed_experts.quant_method.moe_kernel)


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (
            make_runner(DeepEPHTPrepareAndFinalize),
            "MoE dispatch cannot be decomposed (DeepEPHTPrepareAndFinalize;",
        ),
        (
            make_runner(quant_method=SimpleNamespace(moe_kernel=None)),
            "MoE dispatch cannot be decomposed (NoneType; known: ",
        ),
        (make_runner(quant_method=OTHER_METHOD), "the MoE method cannot be decomposed (SimpleNamespace; known: "),
        (make_runner(quant_dtype=torch.int8), "quantizes tokens before it sends them"),
        (make_runner(gate=None), "does not hold its gate"),
        (make_runner(_fse_fuse_gate=True), "does not hold its gate"),
        (make_runner(routed_input_transform=object()), "transforms tokens before the experts"),
        (make_runner(routed_output_transform=object()), "transforms results after the experts"),
        (make_runner(apply_router_weight_on_input=True), "weights tokens before the experts"),
        (make_runner(hidden_dim=16), "pads its hidden states"),
        (make_runner(router=ZeroExpertRouter()), "adds an output of its router"),
        (make_runner(skip_final_all_reduce=True), "leaves its last all-reduce to the model"),
    ],
)
def test_a_layer_that_cannot_be_decomposed_declines_with_the_reason(runner: Any, reason: str) -> None:
    assert reason in str(CPU.get_moe_layer(runner).check())
    with pytest.raises(DeclineError, match="the MoE"):
        ModelCollectives(CPU, ONE, TWO).decompose(runner)


def test_an_unknown_class_is_named() -> None:
    for unknown in (DerivedRunner(**vars(make_runner())), SimpleNamespace()):
        with pytest.raises(DeclineError, match=rf"the MoE class cannot be decomposed \({type(unknown).__name__};"):
            ModelCollectives(CPU, ONE, TWO).decompose(unknown)


def test_without_data_parallel_a_layer_stays_one_op() -> None:
    assert ModelCollectives(CPU, TWO).decompose(make_runner(dp_size=1)) is None


def test_a_layer_of_the_real_vllm_without_data_parallel_stays_one_op(one_rank: Engine) -> None:
    runner = one_rank.runner.get_model().model.layers[1].mlp.experts
    assert not CPU.get_moe_layer(runner).needs_dispatch
    assert ModelCollectives(CPU, ONE).decompose(runner) is None


def test_all_to_all_needs_every_expert_on_one_rank() -> None:
    with pytest.raises(DeclineError, match="--enable-expert-parallel"):
        ModelCollectives(CPU, ONE, TWO, "all_to_all").decompose(make_runner(expert_map=None))


def test_ranks_with_all_shared_experts_have_to_dispatch_chunks() -> None:
    class Replicated(MoeLayer):
        has_replicated_shared_experts = True

    platform: Any = SimpleNamespace(get_moe_layer=Replicated, exchanges_sizes_separately=False)
    with pytest.raises(DeclineError, match="need DBO_DISPATCH=all_to_all"):
        ModelCollectives(platform, TWO, TWO).decompose(make_runner())
    for layer, reduces in ((platform, False), (CPU, True)):
        collectives = ModelCollectives(layer, TWO, TWO, "all_to_all", FOUR)
        with pytest.raises(DeclineError, match="does not take chunks"):
            collectives.decompose(make_runner())
        parts = collectives.decompose(make_runner(), takes_chunks=True)
        assert parts is not None
        assert (parts.is_sequence_parallel, parts.reduces_shared_experts) == (True, reduces)


def test_all_to_all_needs_the_same_placement_in_all_layers() -> None:
    collectives = ModelCollectives(CPU, ONE, TWO, "all_to_all")
    assert collectives.decompose(make_runner()) is not None
    assert collectives.decompose(make_runner()) is not None
    with pytest.raises(DeclineError, match="on the same ranks"):
        collectives.decompose(make_runner(expert_map=torch.tensor([-1, -1, 0, 1])))


def test_only_a_lone_tensor_parallel_rank_under_data_parallel_has_nothing_to_reduce() -> None:
    assert [ModelCollectives(CPU, *groups).reduces for groups in ((ONE,), (TWO,), (ONE, TWO), (TWO, TWO))] == [
        True,
        True,
        False,
        True,
    ]


def make_layer(**parts: Any) -> SimpleNamespace:
    layer = {
        "self_attn": None,
        "input_layernorm": lambda x, residual: (x, residual),
        "post_attention_layernorm": lambda x, residual: (x, residual),
        "mlp": lambda x: x,
    }
    return SimpleNamespace(**{**layer, **parts})


def record(collectives: ModelCollectives, dp_size: int = 2) -> Program:
    layers = [make_layer(), make_layer(mlp=DeepseekV2MoE(experts=make_runner(dp_size=dp_size)))]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, norm=None))
    return record_program(DeepseekAdapter(), model, collectives)


DISPATCHED = ["attn_norm", "attention", "mlp_norm", "gate", "dispatch", "shared_experts", "experts", "combine", "merge"]


def test_under_data_parallel_dispatch_and_combine_are_ops_of_the_comm_lane() -> None:
    program = record(ModelCollectives(CPU, ONE, TWO))
    layer = [op for op in program.ops if op.layer == 1]
    assert [op.name for op in layer] == DISPATCHED
    assert [op.name for op in program.ops if op.layer == 0] == ["attn_norm", "attention", "mlp_norm", "mlp"]
    comm = {op.name: op.communicator for op in layer if op.lane == "comm"}
    assert comm == {"dispatch": "experts", "combine": "experts"}
    assert not any(op.host_sync for op in layer)


def test_all_to_all_exchanges_sizes_and_then_syncs_the_host() -> None:
    layer = [op for op in record(ModelCollectives(NPU, ONE, TWO, "all_to_all")).ops if op.layer == 1]
    assert [op.name for op in layer] == [
        *DISPATCHED[:4],
        "sizes",
        "shared_experts",
        "dispatch",
        "experts",
        "combine",
        "merge",
    ]  # the shared experts are issued before the host waits
    assert [op.name for op in layer if op.host_sync] == ["dispatch"]


def test_a_lane_that_may_wait_by_itself_exchanges_sizes_within_dispatch() -> None:
    layer = [op for op in record(ModelCollectives(CPU, ONE, TWO, "all_to_all")).ops if op.layer == 1]
    assert [op.name for op in layer] == DISPATCHED
    assert not any(op.host_sync for op in layer)


def test_a_schedule_that_syncs_the_host_cannot_be_captured_and_names_the_op() -> None:
    programs = [record(ModelCollectives(NPU, ONE, TWO, "all_to_all"))] * 2
    schedule = lower(programs, alternate(programs))
    validate(schedule)
    with pytest.raises(ScheduleError, match=r"L1\.dispatch/0 blocks the host"):
        validate(schedule, capture=True)


def test_tensor_parallel_below_data_parallel_still_reduces() -> None:
    names = [op.name for op in record(ModelCollectives(CPU, TWO, TWO)).ops if op.layer == 1]
    assert names == [*DISPATCHED[:2], "attn_reduce", *DISPATCHED[2:], "mlp_reduce"]


@pytest.mark.parametrize("data_parallel", [None, TWO])
@pytest.mark.parametrize("platform", [CPU, NPU])
def test_tensor_parallel_ranks_that_dispatch_chunks_gather_instead_of_reducing(
    platform: Platform, data_parallel: Any
) -> None:
    collectives = ModelCollectives(platform, TWO, data_parallel, "all_to_all", FOUR)
    layer = [op for op in record(collectives, dp_size=2 if data_parallel else 1).ops if op.layer == 1]
    names = [op.name for op in layer]
    assert names[:3] == ["attn_norm", "attention", "attn_reduce"]
    assert names[-5:] == ["shared_scatter", "experts", "combine", "merge", "gather"]
    comm = {op.name: op.communicator for op in layer if op.lane == "comm"}
    experts = {name for name, communicator in comm.items() if communicator == "experts"}
    assert experts == {"dispatch", "combine", *(["sizes"] if platform is NPU else [])}
    (reducing,) = {comm[name] for name in ("attn_reduce", "shared_scatter", "gather")}
    programs = [record(collectives, dp_size=2 if data_parallel else 1)] * 2
    schedule = lower(programs, alternate(programs))
    groups = {reducing: ((0, 1), (2, 3)), "experts": ((0, 1, 2, 3),)}
    validate_ranks([RankPlan(schedule)] * 4, groups)


class SharedInParts(MoeLayer):
    """A layer whose shared experts each rank has a part of, as vllm-ascend's have by default."""

    has_replicated_shared_experts = False


PARTS: Any = SimpleNamespace(
    get_moe_layer=SharedInParts,
    exchanges_sizes_separately=False,
    copying_modules=(),
    get_unreduced=lambda module, parts: None,
)


@pytest.mark.parametrize("platform", [CPU, PARTS])
def test_layers_that_are_sequence_parallel_pass_on_chunks_until_the_next_attention(platform: Any) -> None:
    """The dense first layer, and one after them, take and give all tokens."""
    runner = make_runner(is_sequence_parallel=True)
    experts = {"mlp": DeepseekV2MoE(experts=runner), "use_sequence_parallel_moe": True}
    layers = [make_layer(), make_layer(**experts), make_layer(**experts), make_layer(), make_layer(**experts)]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, norm=None))
    program = record_program(DeepseekAdapter(), model, ModelCollectives(platform, TWO, TWO, "all_gather", FOUR))
    comm = {
        index: [op.name for op in program.ops if op.layer == index and op.lane == "comm"]
        for index in (*range(len(layers)), None)
    }
    shared = ["dispatch", "combine"] if platform is CPU else ["dispatch", "shared_gather", "shared_scatter", "combine"]
    assert comm == {
        0: ["attn_reduce", "mlp_reduce"],
        1: ["attn_scatter", *shared],
        2: ["attn_gather", "attn_scatter", *shared],
        3: ["attn_gather", "attn_reduce", "residual_gather", "mlp_reduce"],
        4: ["attn_scatter", *shared],
        None: ["final_gather"],
    }
    schedule = lower([program] * 2, alternate([program] * 2))
    (tokens,) = {op.communicator for op in program.ops if op.lane == "comm"} - {"experts"}
    validate_ranks([RankPlan(schedule)] * 4, {tokens: ((0, 1), (2, 3)), "experts": ((0, 1, 2, 3),)})
    steps = {step.label: number for number, step in enumerate(schedule.instructions)}
    assert steps["L2.attn_gather/0"] < steps["L1.merge/1"], "it is issued before the other micro-batch computes"


@pytest.mark.parametrize("data_parallel", [None, TWO])
def test_a_layer_that_takes_all_tokens_is_left_so_where_tokens_stay_on_their_rank(data_parallel: Any) -> None:
    """Not all models of vLLM have sequence-parallel layers; between data parallel ranks the dispatch is of chunks."""
    collectives = ModelCollectives(CPU, TWO, data_parallel, "all_gather", FOUR)
    for is_sequence_parallel in (False, True):
        runner = make_runner(is_sequence_parallel=is_sequence_parallel, dp_size=2 if data_parallel else 1)
        parts = collectives.decompose(runner, takes_chunks=True)
        assert (parts is not None) == (is_sequence_parallel or data_parallel is not None)
        assert parts is None or parts.is_sequence_parallel


@pytest.mark.parametrize("data_parallel", [None, TWO])
def test_kernels_that_dispatch_are_one_op_between_reduces_and_gathers(data_parallel: Any) -> None:
    """The shared experts come first, so that their results are reduced while the kernels run."""
    collectives = ModelCollectives(NPU, TWO, data_parallel, "fused", FOUR)
    program = record(collectives, dp_size=2 if data_parallel else 1)
    layer = [op for op in program.ops if op.layer == 1]
    assert [op.name for op in layer] == [
        *("attn_norm", "attention", "attn_reduce", "mlp_norm", "chunk"),
        *("shared_experts", "shared_scatter", "moe", "merge", "gather"),
    ]
    assert [op.name for op in layer if op.lane == "comm"] == ["attn_reduce", "shared_scatter", "gather"]
    (reducing,) = {op.communicator for op in program.ops if op.lane == "comm"}
    schedule = lower([program] * 2, alternate([program] * 2))
    validate_ranks([RankPlan(schedule)] * 4, {reducing: ((0, 1), (2, 3))})
    validate(schedule, capture=True)


def test_without_tensor_parallel_kernels_that_dispatch_leave_nothing_to_hide() -> None:
    with pytest.raises(DeclineError, match="fused into its kernels \\(without tensor parallel"):
        ModelCollectives(NPU, ONE, TWO, "fused").decompose(make_runner(), takes_chunks=True)


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_all_ranks_schedules_fit_together_and_experts_run_concurrently_with_the_others_dispatch(dispatch: str) -> None:
    programs = [record(ModelCollectives(CPU, ONE, TWO, dispatch))] * 2
    schedule = lower(programs, alternate(programs))
    validate_ranks([RankPlan(schedule, ((3, 4), (4, 4)))] * 2)
    order = [step.label for step in schedule.instructions if step.op.name in ("dispatch", "experts", "combine")]
    assert order == [
        f"L1.{name}" for name in ("dispatch/0", "dispatch/1", "experts/0", "combine/0", "experts/1", "combine/1")
    ]
    by_label = {step.label: step for step in schedule.instructions}
    waits = {
        programs[0].ops[issue.position].label + f"/{issue.micro_batch}" for issue in by_label["L1.experts/0"].waits
    }
    assert waits == {"L1.dispatch/0"}, "experts of one micro-batch must not wait for the other's dispatch"


def test_merge_scales_and_adds_as_the_runner_does() -> None:
    def scale(shared: Any, routed: torch.Tensor) -> tuple[Any, torch.Tensor]:
        routed *= 2.5
        return shared, routed

    runner = make_runner(shared_experts=None)
    runner._maybe_apply_routed_scale_to_output = scale
    parts = SplitExperts(CPU.get_moe_layer(runner), lambda: None, exchanges_sizes=False)
    assert not parts.has_shared_experts
    assert torch.equal(parts.merge(torch.ones(2, 2)), torch.full((2, 2), 2.5))
    assert torch.equal(parts.merge(torch.ones(2, 2), torch.ones(2, 2)), torch.full((2, 2), 3.5))


def test_kernels_that_dispatch_do_not_take_experts_that_are_placed_by_load() -> None:
    class Balanced(MoeLayer):
        is_load_balanced = True

        def check(self) -> None:
            return None

    platform: Any = SimpleNamespace(get_moe_layer=Balanced, exchanges_sizes_separately=False)
    with pytest.raises(DeclineError, match="fused into its kernels \\(and experts are load balanced"):
        ModelCollectives(platform, TWO, TWO, "fused", FOUR).decompose(make_runner(), takes_chunks=True)


@pytest.mark.parametrize(("rank", "sent"), [(0, [True, True]), (1, [True, False])])
def test_padding_of_a_chunk_is_not_sent_to_experts(rank: int, sent: list[bool]) -> None:
    """Of three tokens on two ranks the second chunk has one, and padding."""

    class Routed(MoeLayer):
        def choose_experts(self, x: torch.Tensor, input_ids: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
            return x.new_ones(len(x), 2), torch.zeros(len(x), 2, dtype=torch.int32)

    group: Any = SimpleNamespace(world_size=2, rank_in_group=rank)
    dispatcher: Any = SimpleNamespace(choose_ranks=lambda routing: routing._replace(chosen=torch.ones(2, 2).bool()))
    take_chunk = ModelCollectives(CPU, group).take_chunk
    experts = SequenceParallelExperts(Routed(make_runner()), lambda: dispatcher, False, 2, take_chunk)
    with override_forward_context(SimpleNamespace(dp_metadata=None)):
        routing = experts.gate(torch.zeros(2, 8), 3)
    assert routing.sizes == (2, 2)
    assert routing.chosen is not None
    assert routing.chosen.tolist() == [[is_sent] * 2 for is_sent in sent]
