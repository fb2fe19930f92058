"""Two data parallel ranks in states drawn at random, each of which decides the same steps: none waits for the other.

Each rank runs in a greenlet, and every collective waits there until the other rank has come to one, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.setting_values import Check
from dbo_runtime.vllm_plugin.api.forward_context import enter_context
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel import agreement as agreement_module
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.local_plan import FAILED
from dbo_runtime.vllm_plugin.step.step_decision import StepDecision
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from tests.support.planner.machines import make_table
from tests.support.profiles import scale
from tests.support.vllm.splitters import BLOCK, CONFIG, FakeBuilder, NeedsWidth, make_common, make_group
from tests.support.vllm.splitters import _traced as _traced

EXAMPLES = max(150, scale(1000))
ENGINE: Any = SimpleNamespace(**vars(CONFIG), cache_config=SimpleNamespace(mamba_cache_mode="none"))
STATES = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,))
ERRORS = (IndexError("no such block"), AssertionError(), torch.OutOfMemoryError("none left"), TypeError("an argument"))


@dataclass
class OtherMetadata(CommonAttentionMetadata):
    """Metadata of a version with a field that is not known here."""

    unheard_of: torch.Tensor | None = None


class Rank(NamedTuple):
    """What one rank has in a step, and the others do not see but for its number of tokens.

    Attributes:
        queries: new tokens of each request; none for an idle rank, which runs a dummy batch of one token.
        computed: tokens of each request that are cached already.
        blocks: of each request's KV cache; requests may share some.
        flaw: what else there is; see `FLAWS`.
        error: raised where that is the flaw.
    """

    queries: tuple[int, ...]
    computed: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    flaw: str
    error: Exception

    @property
    def tokens(self) -> int:
        return sum(self.queries) or 1


class Shared(NamedTuple):
    """What vLLM, the model and the settings make equal on both ranks."""

    config: RuntimeConfig
    no_micro: Decline | None
    has_states: bool
    has_costs: bool
    transport: str
    graphs: tuple[CUDAGraphMode, ...]
    phases: tuple[Phase, ...]


NO_MICRO = Decline("a drafter that is not known here")
FLAWS = (
    *("none",) * 16,
    *("cascade", "unsupported field", "unknown field", "no lengths", "unknown origin", "other builder"),
    *("split already", "padding", "per-token data", "arguments"),
    *("error in builder",) * 8,
)


@st.composite
def draw_rank(draw: st.DrawFn) -> Rank:
    requests = draw(st.integers(0, 4))
    queries = draw(st.lists(st.sampled_from((1, 1, 1, 2, 3, 5, 8)), min_size=requests, max_size=requests))
    computed = draw(st.lists(st.sampled_from((0, 0, 16, 17, 40)), min_size=requests, max_size=requests))
    row = st.tuples(*[st.integers(0, 9)] * 4)
    blocks = draw(st.lists(row, min_size=requests, max_size=requests))
    flaw, error = draw(st.sampled_from(FLAWS)), draw(st.sampled_from(ERRORS))
    return Rank(tuple(queries), tuple(computed), tuple(blocks), flaw, error)


@st.composite
def draw_shared(draw: st.DrawFn, steps: int) -> Shared:
    config = RuntimeConfig(
        enabled=True,
        mode=draw(st.sampled_from(("always",) * 8 + ("auto", "off"))),
        micro_batches=draw(st.sampled_from((None, 2, 3, 5))),
        min_tokens=draw(st.sampled_from((1, 6))),
        side=draw(st.sampled_from(("auto", "auto", "on"))),
        check=draw(st.sampled_from((Check.OFF, Check.OFF, Check.RESULTS))),
        split=draw(st.sampled_from(("auto", "auto", "micro", "nano"))),
    )
    graphs = (CUDAGraphMode.NONE,) * 8 + (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    phases = (Phase.SERVING,) * 8 + (Phase.STARTING, Phase.PROFILING)
    return Shared(
        config,
        no_micro=draw(st.sampled_from((None, None, None, NO_MICRO))),
        has_states=draw(st.booleans()),
        has_costs=draw(st.booleans()),
        transport=draw(st.sampled_from(("network", "network", "one host"))),
        graphs=tuple(draw(st.sampled_from(graphs)) for _ in range(steps)),
        phases=tuple(draw(st.sampled_from(phases)) for _ in range(steps)),
    )


def make_program() -> Program:
    p = ProgramBuilder(has_side=True)
    x = p.input("x")
    p.side("aside", lambda x: x, x)
    x = p.compute("attention", lambda x: x, x)
    x = p.comm("reduce", lambda x: x, x, overwrites=(x,), token_wise=True)
    return p.build(p.compute("mlp", lambda x: x, x, token_wise=True))


PROGRAM = make_program()
COSTS: dict[str, Any] = {
    "aside": ComputeCost(per_token=1e-6),
    "attention": ComputeCost(per_token=1e-5),
    "reduce": CommCost(0.0, 1e-5, 1.0),
    "mlp": ComputeCost(per_token=1e-5),
}


class FailingBuilder(FakeBuilder):
    """Fails when it builds for a slice, but not for the step."""

    error: Exception | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if self.error is not None:
            raise self.error
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


def make_context(rank: Rank, shared: Shared, tokens: Sequence[int], graph: CUDAGraphMode) -> ForwardContext:
    """Return the forward context of a step on one rank; *tokens* are those of all ranks."""
    metadata: Any = {}
    if rank.queries:
        metadata = build_metadata(rank, shared)
    data = {"one each": torch.zeros(rank.tokens)} if rank.flaw == "per-token data" else {}
    return ForwardContext(
        no_compile_layers={},
        attn_metadata=[metadata, metadata] if rank.flaw == "split already" and rank.queries else metadata,
        slot_mapping={layer: torch.arange(rank.tokens) for layer in metadata},
        dp_metadata=DPMetadata(torch.tensor(tokens, dtype=torch.int32)),
        cudagraph_runtime_mode=graph,
        is_padding=torch.zeros(rank.tokens + (rank.flaw == "padding"), dtype=torch.bool),
        additional_kwargs=data,
    )


def build_metadata(rank: Rank, shared: Shared) -> dict[str, Any]:
    """Return the attention metadata of a step by layer, as vLLM's runner has it."""
    common = make_common(rank.queries, rank.computed, OtherMetadata)
    common.block_table_tensor = torch.tensor(rank.blocks, dtype=torch.int32)
    if rank.flaw == "unsupported field":
        common.encoder_seq_lens = torch.ones(len(rank.queries))
    if rank.flaw == "unknown field":
        common.unheard_of = torch.zeros(len(rank.queries))
    if rank.flaw == "no lengths":
        common.seq_lens_cpu_upper_bound = None
    failing = type("OwnBuilder", (FailingBuilder,), {})  # whose slices' builders fail with it
    other = {"block_table_width": 4} if rank.flaw == "other builder" else {}
    group = make_group(NeedsWidth if other else failing, **other)
    (builder,) = group.metadata_builders
    if shared.has_states:
        builder.kv_cache_spec = STATES
    metadata = group.get_metadata_builder().build(1 if rank.flaw == "cascade" else 0, common)
    if rank.flaw == "error in builder":
        failing.error = rank.error
    if rank.flaw == "unknown origin":
        del metadata._dbo_source
    return dict.fromkeys(group.layer_names, metadata)


class Pair:
    """The group of two ranks: a collective gives each what both have brought to it."""

    world_size = 2
    cpu_group = "cpu"

    def gather_number(self, gathered: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        for one, brought in zip(gathered, self.meet("number", own), strict=True):
            one.copy_(brought)

    def exchange(self, group: object, own: bytes) -> list[bytes]:
        return self.meet("bytes", own)

    def meet(self, kind: str, own: Any) -> list[Any]:
        brought: list[Any] = getcurrent().parent.switch((kind, own))
        return brought

    @contextmanager
    def connected(self) -> Iterator[None]:
        with (
            patch.object(dist, "all_gather", self.gather_number),
            patch.object(agreement_module, "exchange_bytes", self.exchange),
        ):
            yield


def run_both(jobs: Sequence[Callable[[], Any]]) -> tuple[list[Any], int]:
    """Run a job on each rank; return the results, and how often ranks met.

    Raises:
        AssertionError: if a rank has ended, or comes to another collective, while the other waits in one.
    """
    ranks = [greenlet(job) for job in jobs]
    found = [rank.switch() for rank in ranks]
    met = 0
    while not all(rank.dead for rank in ranks):
        assert not any(rank.dead for rank in ranks), f"a rank waits for ever: {found}"
        assert len({kind for kind, _ in found}) == 1, f"ranks are in different collectives: {found}"
        met += 1
        brought = [own for _, own in found]
        found = [rank.switch(brought) for rank in ranks]
    return found, met


def make_deciders(shared: Shared, pair: Pair) -> list[StepDecider]:
    deciders = []
    for number in range(2):
        device, log = VirtualDevice(lambda step: 1.0), open_log(quiet=True)
        runtime = MicroBatchRuntime(PROGRAM, device, shared.config, log, rows=TENSOR_ROWS)
        if shared.has_costs:
            runtime.planner = Planner(PROGRAM, make_table(PROGRAM, COSTS), rows=TENSOR_ROWS)
        splitter = ContextSplitter(get_platform("cpu"), ENGINE)
        group: Any = pair
        decider = StepDecider(runtime, splitter, Agreement(group), shared.transport, number)
        decider.no_micro = shared.no_micro
        runtime.config = decider.limit(runtime.config)
        deciders.append(decider)
    return deciders


def decide(decider: StepDecider, phase: Phase, rank: Rank, context: ForwardContext) -> StepDecision | Exception:
    """Decide a step as `SplitForward` does; an error is returned."""
    unsupported = Decline("unknown arguments of forward()") if rank.flaw == "arguments" else None
    try:
        with override_forward_context(context):
            if phase is Phase.SERVING:
                return decider.decide(rank.tokens, unsupported)
            return decider.warm_up.decide(phase, rank.tokens, unsupported, is_compared=False)
    except Exception as error:  # noqa: BLE001 - the test is about it
        return error
    finally:
        enter_context(None)  # type: ignore[arg-type]  # greenlets leave contexts in another order than they enter them


def judge(decisions: Sequence[StepDecision | Exception], met: int, tokens: Sequence[int], is_dummy: bool) -> str:
    """Return what became of a step on both ranks, after checking that it became the same.

    They must have asked each other, but for a dummy step, which is the same on both.
    """
    for decision in decisions:
        assert not isinstance(decision, Exception), decisions
    one, other = decisions
    plans = [decision.plan for decision in decisions]  # type: ignore[union-attr]
    if isinstance(plans[0], Decline):
        assert plans[0] == plans[1], "ranks decline for other reasons"
        return "voted down" if met else "declined without a vote"
    first, second = plans
    assert isinstance(second, ExecutionPlan), "only one rank splits"
    assert met > 0 or is_dummy, "ranks run a plan without having asked"
    assert (first.digest, len(first.slices)) == (second.digest, len(second.slices))
    assert one.fingerprint == other.fingerprint
    sizes = [[c.dp_metadata.num_tokens_across_dp_cpu.tolist() for c in each.contexts] for each in (one, other)]
    assert sizes[0] == sizes[1]
    for number, plan in enumerate(plans):
        pieces = [*plan.slices, *plan.nano_batches]  # the whole step, and then its nano-batches
        assert [piece.size for piece in pieces] == [part[number] for part in sizes[0]]
        assert plan.slices[-1].last_token >= tokens[number]
        if plan.nano_batches:
            assert [piece.last_token for piece in pieces[:1] + pieces[-1:]] == [tokens[number]] * 2
        if plan.mode == "split" and plan.slices[-1].last_token > tokens[number]:
            assert [piece.first_token < tokens[number] for piece in plan.slices] == [True] + [False] * (
                len(plan.slices) - 1
            ), "the requests of a padded rank are whole"
    return first.mode


@pytest.mark.slow
@pytest.mark.usefixtures("_traced")
def test_ranks_in_any_states_decide_alike_and_none_waits_for_ever() -> None:
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, report_multiple_bugs=False)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        steps = data.draw(st.lists(st.tuples(draw_rank(), draw_rank()), min_size=1, max_size=4))
        shared, pair = data.draw(draw_shared(len(steps))), Pair()
        deciders = make_deciders(shared, pair)
        for drawn, graph, phase in zip(steps, shared.graphs, shared.phases, strict=True):
            is_dummy = phase is not Phase.SERVING  # vLLM warms up, captures and profiles with the same on all ranks
            ranks = (drawn[0]._replace(flaw="none"),) * 2 if is_dummy else drawn
            tokens = [rank.tokens for rank in ranks]
            jobs = []
            for decider, rank in zip(deciders, ranks, strict=True):
                context = make_context(rank, shared, tokens, graph)
                if phase is Phase.PROFILING:
                    context.attn_metadata = None
                jobs.append(partial(decide, decider, phase, rank, context))
            with pair.connected():
                decisions, met = run_both(jobs)
            outcomes[judge(decisions, met, tokens, is_dummy)] += 1
            reasons.update(each.plan.reason for each in decisions if isinstance(each.plan, Decline))

    run()
    kinds = ("split", "nano", "concurrent", "voted down", "declined without a vote")
    assert min(outcomes[kind] for kind in kinds) > 3, outcomes
    assert reasons[FAILED] > 0, reasons
    assert len(reasons) > 7, f"too few reasons were met to show much: {reasons}"
