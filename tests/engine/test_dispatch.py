"""Tokens are dispatched and combined between processes over gloo, and arrive as plain computations say."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dbo_models.toy import ToyCollectives
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.batch import Batch, share_data_parallel
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.dispatch import (
    AllGather,
    AllToAll,
    CombineHandle,
    DispatchedTokens,
    Dispatcher,
    QuantizedTokens,
    Routing,
    exchange_rows,
    gather_rows,
    pad_chunks,
    reduce_rows,
)
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ScheduleError, SplitError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.validate import validate
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.online.cuts import Cut
from tests.support.reference_model import ReferenceAdapter, ReferenceCollectives, ReferenceModel, place_experts

PATIENCE = 60.0  # seconds for one case; far more than any takes
EXPERTS = 12  # of all ranks together
HIDDEN = 16
LONGEST = 3e-4  # seconds that an op is held up


class Ranks:
    """Processes that are the ranks of one gloo group over loopback. They stay for many cases, as starting is slow.

    After a failure they are ended, because some may be left in the middle of a collective; the next case starts others.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._count = count
        self._folder = folder
        self._starts = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, case: Callable[..., None], *arguments: Any) -> None:
        """Call the function on all ranks at once; it is sent by name."""
        if not self._processes:
            self._start()
        deadline = time.monotonic() + PATIENCE
        try:
            for pipe in self._pipes:
                pipe.send((case, arguments))
            waiting = list(self._pipes)
            while waiting:
                answered: list[Any] = wait(waiting, deadline - time.monotonic())
                assert answered, f"ranks {[self._pipes.index(pipe) for pipe in waiting]} hang"
                for pipe in answered:
                    problem = pipe.recv()
                    assert problem is None, f"rank {self._pipes.index(pipe)}: {problem}"
                    waiting.remove(pipe)
        except BaseException:
            self.end(patience=0)
            raise

    def end(self, patience: float = 10) -> None:
        """End the processes, by force where they take longer than *patience*."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience)
            process.kill()
            process.join()
            process.close()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        self._starts += 1
        store = str(self._folder / f"store{self._starts}")
        context = multiprocessing.get_context("spawn")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
            for rank in range(self._count):
                here, there = context.Pipe()
                process = context.Process(target=serve, args=(rank, self._count, store, there), daemon=True)
                process.start()
                there.close()  # so that its end is noticed here
                self._pipes.append(here)
                self._processes.append(process)


def serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    """Be one rank: run what comes through the pipe until it closes."""
    warnings.simplefilter("error")  # as in the tests' own process
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.FileStore(store, count), timeout=patience)
    with suppress(EOFError):
        while True:
            case, arguments = pipe.recv()
            try:
                case(*arguments)
                pipe.send(None)
            except BaseException:  # noqa: BLE001 - it fails the test on the other side
                pipe.send(traceback.format_exc())
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


def all_gather() -> Dispatcher:
    return AllGather(dist.group.WORLD)


def all_to_all() -> Dispatcher:
    return AllToAll(dist.group.WORLD, find_owners())


def find_owners() -> torch.Tensor:
    """Return the rank of each expert [experts]: dealt out in turn, so that neighbours are apart."""
    return torch.arange(EXPERTS) % dist.get_world_size()


both = pytest.mark.parametrize("make", [all_gather, all_to_all])


class Tokens(NamedTuple):
    """What one rank sends: x [tokens, hidden], weights and ids [tokens, top_k]."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


class Types(NamedTuple):
    x: torch.dtype
    weights: torch.dtype
    ids: torch.dtype


class Traffic(NamedTuple):
    """One micro-batch: *sizes* of up to three ranks; *allow* says which experts the tokens of a rank choose from."""

    sizes: tuple[int, ...]
    allow: Callable[[int, torch.Tensor], torch.Tensor]
    top_k: int = 2
    types: Types = Types(torch.float32, torch.float32, torch.int64)


def anywhere(rank: int, owners: torch.Tensor) -> torch.Tensor:
    return owners >= 0


def elsewhere(rank: int, owners: torch.Tensor) -> torch.Tensor:
    return owners != rank


def first_rank(rank: int, owners: torch.Tensor) -> torch.Tensor:
    return owners == 0


def draw_tokens(traffic: Traffic, rank: int) -> Tokens:
    """Return the tokens of any rank: all ranks draw the same. *x* are small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(1000 * traffic.sizes[rank] + rank)
    size, (_, allow, top_k, types) = traffic.sizes[rank], traffic
    allowed = allow(rank, find_owners()).nonzero()[:, 0]
    x = torch.randint(-2, 3, (size, HIDDEN), generator=generator)
    places = torch.rand(size, len(allowed), generator=generator).argsort(dim=1)[:, :top_k]
    weights = torch.randn(size, top_k, generator=generator)
    for row, odd in zip(weights, (-0.0, torch.inf, 1e-40), strict=False):
        row[0] = odd  # values whose bits arithmetic might change
    return Tokens(x.to(types.x), weights.to(types.weights), allowed[places].to(types.ids))


def send(dispatcher: Dispatcher, tokens: Tokens, sizes: tuple[int, ...]) -> tuple[DispatchedTokens, CombineHandle]:
    routing = dispatcher.choose_ranks(Routing(tokens.weights, tokens.ids, sizes))
    return dispatcher.dispatch(tokens.x, dispatcher.exchange_sizes(routing))


def find_arrivals(all_ranks: list[Tokens], rank: int, only_chosen: bool) -> list[tuple[int, int]]:
    """Return (rank, token) of what arrives at a rank, in order: one token at a time, one expert at a time."""
    owners = find_owners().tolist()
    return [
        (source, token)
        for source, tokens in enumerate(all_ranks)
        for token, experts in enumerate(tokens.ids.tolist())
        if not only_chosen or any(owners[expert] == rank for expert in experts)
    ]


def check_arrival(found: DispatchedTokens, all_ranks: list[Tokens], only_chosen: bool) -> None:
    arrivals = find_arrivals(all_ranks, dist.get_rank(), only_chosen)
    for received, kind in ((found.x, "x"), (found.weights, "weights"), (found.ids, "ids")):
        rows = [getattr(all_ranks[source], kind)[token] for source, token in arrivals]
        expected = torch.stack(rows) if rows else getattr(all_ranks[0], kind)[:0]
        assert received.dtype == expected.dtype, kind
        assert received.shape == expected.shape, kind
        assert torch.equal(received.view(torch.uint8), expected.view(torch.uint8)), kind  # every bit of it


def check_handle(handle: CombineHandle, all_ranks: list[Tokens], only_chosen: bool) -> None:
    """Check that the way back is told as the tokens were sent."""
    rank, everyone = dist.get_rank(), range(len(all_ranks))
    arrivals = [[source for source, _ in find_arrivals(all_ranks, other, only_chosen)] for other in everyone]
    assert handle.tokens == len(all_ranks[rank].x)
    assert list(handle.sent) == [arrivals[other].count(rank) for other in everyone]
    assert list(handle.received) == [arrivals[rank].count(other) for other in everyone]


def multiply(received: DispatchedTokens, owners: torch.Tensor) -> torch.Tensor:
    """Be this rank's experts: expert e multiplies by e + 1 [received, hidden]."""
    here = owners[received.ids.long()] == dist.get_rank()
    return received.x * ((received.ids + 1) * here).sum(dim=1, keepdim=True).to(received.x.dtype)


def check_return(combined: torch.Tensor, own: Tokens) -> None:
    expected = own.x * (own.ids + 1).sum(dim=1, keepdim=True).to(own.x.dtype)
    assert combined.dtype == expected.dtype
    assert torch.equal(combined, expected)


def there_and_back(make: Callable[[], Dispatcher], traffics: list[Traffic], way_back: list[int]) -> None:
    """Dispatch one micro-batch after the other, then combine them in the order *way_back*."""
    dispatcher, rank, count = make(), dist.get_rank(), dist.get_world_size()
    under_way = []
    for traffic in traffics:
        all_ranks = [draw_tokens(traffic, other) for other in range(count)]
        received, handle = send(dispatcher, all_ranks[rank], traffic.sizes[:count])
        all_ranks[rank].x.fill_(7)  # what was dispatched may be dropped, and its memory used again
        under_way.append((received, handle))
    for micro_batch in way_back:
        traffic, (received, handle) = traffics[micro_batch], under_way[micro_batch]
        all_ranks = [draw_tokens(traffic, other) for other in range(count)]
        check_arrival(received, all_ranks, only_chosen=make is all_to_all)
        check_handle(handle, all_ranks, only_chosen=make is all_to_all)
        check_return(dispatcher.combine(multiply(received, find_owners()), handle), all_ranks[rank])


def dispatch_quantized(make: Callable[[], Dispatcher], sizes: tuple[int, ...]) -> None:
    """Dispatch integers in the place of tokens, each with a scale that says whose it is."""
    dispatcher, rank, count = make(), dist.get_rank(), dist.get_world_size()
    all_ranks = [draw_tokens(Traffic(sizes, anywhere), other) for other in range(count)]
    integers = [tokens._replace(x=tokens.x.to(torch.int8)) for tokens in all_ranks]
    scales = [(torch.arange(sizes[other]) + 1000 * other) / 3 for other in range(count)]
    quantized = QuantizedTokens(integers[rank].x, scales[rank])
    routing = Routing(integers[rank].weights, integers[rank].ids, sizes[:count], quantized=quantized)
    received, handle = dispatcher.dispatch(all_ranks[rank].x, dispatcher.choose_ranks(routing))
    only_chosen = make is all_to_all
    check_arrival(received, integers, only_chosen)
    arrivals = find_arrivals(all_ranks, rank, only_chosen)
    assert received.scales is not None
    assert received.scales.tolist() == [float(scales[source][token]) for source, token in arrivals]
    results = multiply(received._replace(x=received.x.float()), find_owners())
    check_return(dispatcher.combine(results, handle), all_ranks[rank])


SIZES = [(7, 7, 7), (200, 1, 30), (1, 200, 0), (0, 5, 3), (0, 0, 0), (1, 1, 1)]
TYPES = [
    Types(torch.float32, torch.float32, torch.int64),
    Types(torch.bfloat16, torch.bfloat16, torch.int32),
    Types(torch.bfloat16, torch.float32, torch.int32),
    Types(torch.float32, torch.bfloat16, torch.int64),
]


def name_types(types: Types) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in types)


@both
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_arrive_where_their_experts_are_and_come_back_summed(
    ranks: Ranks, make: Callable[[], Dispatcher], sizes: tuple[int, ...], top_k: int
) -> None:
    ranks.run(there_and_back, make, [Traffic(sizes, anywhere, top_k)], [0])


@both
@pytest.mark.parametrize("types", TYPES, ids=name_types)
@pytest.mark.parametrize("sizes", [(7, 7, 7), (20, 1, 3)], ids=str)
def test_any_types_arrive_bit_for_bit(
    ranks: Ranks, make: Callable[[], Dispatcher], sizes: tuple[int, ...], types: Types
) -> None:
    ranks.run(there_and_back, make, [Traffic(sizes, anywhere, 4, types)], [0])


@both
@pytest.mark.parametrize("sizes", [(7, 7, 7), (20, 1, 3), (0, 5, 3)], ids=str)
def test_quantized_tokens_arrive_with_their_scales(
    ranks: Ranks, make: Callable[[], Dispatcher], sizes: tuple[int, ...]
) -> None:
    ranks.run(dispatch_quantized, make, sizes)


@both
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("allow", [elsewhere, first_rank])
def test_all_tokens_may_go_to_other_ranks_and_a_rank_may_get_none(
    ranks: Ranks, make: Callable[[], Dispatcher], allow: Callable[..., torch.Tensor], top_k: int
) -> None:
    ranks.run(there_and_back, make, [Traffic((9, 4, 6), allow, top_k)], [0])


@both
@pytest.mark.parametrize("way_back", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_micro_batches_under_way_at_once_do_not_mix(
    ranks: Ranks, make: Callable[[], Dispatcher], way_back: list[int]
) -> None:
    sizes = (8, 3, 5), (8, 3, 5), (2, 9, 0)
    traffics = [Traffic(size, allow) for size, allow in zip(sizes, (anywhere, elsewhere, anywhere), strict=True)]
    ranks.run(there_and_back, make, traffics, way_back)


def send_too_few(make: Callable[[], Dispatcher]) -> None:
    dispatcher, rank = make(), dist.get_rank()
    tokens = draw_tokens(Traffic((4, 4, 4), anywhere), rank)
    sizes = (5,) * dist.get_world_size()
    with pytest.raises(SplitError, match=f"rank {rank} dispatches 4 tokens, but all ranks expect 5"):
        send(dispatcher, tokens, sizes)


@both
def test_a_batch_cut_in_another_place_than_agreed_is_refused(ranks: Ranks, make: Callable[[], Dispatcher]) -> None:
    ranks.run(send_too_few, make)


def draw_rows(count: int, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return rows of any rank: all ranks draw the same. They are not round, so the order of adding them shows."""
    return torch.randn((count, *shape), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("tokens", "ranks", "rows"), [(4, 2, 4), (5, 2, 6), (1, 4, 4), (7, 4, 8)])
def test_chunks_are_equal_with_zeros_after_the_last_token(
    tokens: int, ranks: int, rows: int, shape: tuple[int, ...]
) -> None:
    x = draw_rows(tokens, 0, shape)
    padded = pad_chunks(x, ranks)
    assert padded.shape == (rows, *shape)
    assert torch.equal(padded[:tokens], x)
    assert not padded[tokens:].any()


def move_rows(sizes: tuple[int, ...], shape: tuple[int, ...], contiguous: bool) -> None:
    """Gather, reduce and exchange rows; each rank can tell what it should get from every other."""
    rank, count, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    sizes = sizes[:count]

    def lay_out(rows: torch.Tensor) -> torch.Tensor:
        return rows if contiguous else torch.stack([rows, rows], dim=-1)[..., 0]

    gathered = gather_rows(lay_out(draw_rows(sizes[rank], rank, shape)), sizes, group)
    assert torch.equal(gathered, torch.cat([draw_rows(size, other, shape) for other, size in enumerate(sizes)]))

    reduced = reduce_rows(lay_out(draw_rows(sum(sizes), rank, shape)), sizes, group)
    parts = [draw_rows(sum(sizes), other, shape).split(sizes)[rank] for other in range(count)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(reduced, expected)  # to the last bit: added in rank order

    counts = [[(3 * source + to) % 4 for to in range(count)] for source in range(count)]  # none among them
    received = [counts[source][rank] for source in range(count)]
    exchanged = exchange_rows(lay_out(draw_rows(sum(counts[rank]), rank, shape)), counts[rank], received, group)
    for source, rows in enumerate(exchanged.split(received)):
        assert torch.equal(rows, draw_rows(sum(counts[source]), source, shape).split(counts[source])[rank])


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 1, 2), (0, 3, 0)], ids=str)
def test_rows_are_gathered_reduced_and_exchanged(
    ranks: Ranks, sizes: tuple[int, ...], shape: tuple[int, ...], contiguous: bool
) -> None:
    ranks.run(move_rows, sizes, shape, contiguous)


def delay(program: Program, draw: random.Random) -> Program:
    """Return the program with a pause before each op, so that ranks and lanes drift apart."""

    def pause_and_run(fn: Callable[..., Any], *values: Any) -> Any:
        time.sleep(draw.uniform(0, LONGEST))
        return fn(*values)

    return replace(program, ops=tuple(replace(op, fn=partial(pause_and_run, op.fn)) for op in program.ops))


class Prompt(NamedTuple):
    """One rank's tokens of the reference model, and the truth about them."""

    x: torch.Tensor
    positions: torch.Tensor
    truth: torch.Tensor

    def cut(self, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the inputs of each micro-batch."""
        return list(zip(self.x.split(sizes), self.positions.split(sizes), strict=True))


def draw_prompt(model: ReferenceModel, tokens: int, seed: int) -> Prompt:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(100 + seed))
    positions = torch.arange(tokens)
    truth = model.forward(x, positions)
    model.clear()
    return Prompt(x, positions, truth)


def connect(make: Callable[[], Dispatcher], model: ReferenceModel) -> tuple[Program, ReferenceCollectives]:
    """Return the reference model's program on this rank, and what its micro-batches are entered by."""
    owners = place_experts(EXPERTS, dist.get_world_size())
    dispatcher = make() if make is all_gather else AllToAll(dist.group.WORLD, owners)
    collectives = ReferenceCollectives(dispatcher, (owners == dist.get_rank()).nonzero()[:, 0].tolist())
    return record_program(ReferenceAdapter(), model, collectives), collectives


def check_outputs(outputs: list[Any], expected: list[Any], truth: torch.Tensor) -> None:
    for (output,), (sequential,) in zip(outputs, expected, strict=True):
        assert torch.equal(output, sequential)  # bit for bit: the same ops on the same shapes
    assert find_error(outputs, truth) < 1e-5


def find_error(outputs: list[Any], truth: torch.Tensor) -> float:
    """Return by how much micro-batches' outputs differ from the truth; all values are about one."""
    return float((torch.cat([output for (output,) in outputs]) - truth).abs().amax()) if len(truth) else 0.0


def overlap(make: Callable[[], Dispatcher], policy: tuple[str, int], micro_batches: int) -> None:
    """Run the reference model in overlapped micro-batches, with another number of tokens on each rank."""
    rank, count = dist.get_rank(), dist.get_world_size()
    tokens = (23, 64, 5)[:count]
    config = RuntimeConfig(mode="always", micro_batches=micro_batches, policy=policy)
    sizes = share_data_parallel(tokens, micro_batches)
    assert not isinstance(sizes, Decline)
    own = [size[rank] for size in sizes]
    model = ReferenceModel(hidden=HIDDEN, experts=EXPERTS)
    prompt = draw_prompt(model, tokens[rank], seed=rank)
    program, collectives = connect(make, model)
    inputs, enter = prompt.cut(own), partial(collectives.enter, sizes)
    expected = run_sequential([program] * micro_batches, inputs, enter)

    slow = delay(program, random.Random(rank))
    runtime = MicroBatchRuntime(slow, CpuDevice(), config, open_log(quiet=True))
    plan = runtime.plan(Batch((tokens[rank],), tokens[rank]), list(accumulate(own))[:-1], Cut(sizes=sizes))
    assert not isinstance(plan, Decline)
    try:
        for _ in range(2):  # the second run finds events and lanes used
            model.clear()
            check_outputs(runtime.run(plan, inputs, enter), expected, prompt.truth)
    finally:
        runtime.close()


@both
@pytest.mark.parametrize("policy", [("sequential", 0), ("alternate", 0), ("staggered", 1), ("staggered", 2)], ids=str)
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_overlapped_micro_batches_compute_what_one_process_does_alone(
    ranks: Ranks, make: Callable[[], Dispatcher], policy: tuple[str, int], micro_batches: int
) -> None:
    ranks.run(overlap, make, policy, micro_batches)


def overlap_without_tokens(make: Callable[[], Dispatcher]) -> None:
    """Run micro-batches in which some rank has nothing, as idle ranks do."""
    rank, count = dist.get_rank(), dist.get_world_size()
    sizes = [size[:count] for size in ((5, 0, 0), (0, 4, 0), (3, 2, 0))]
    own = [size[rank] for size in sizes]
    model = ReferenceModel(hidden=HIDDEN, experts=EXPERTS)
    prompt = draw_prompt(model, sum(own), seed=rank)
    program, collectives = connect(make, model)
    inputs, enter = prompt.cut(own), partial(collectives.enter, sizes)
    programs = [program] * len(sizes)
    expected = run_sequential(programs, inputs, enter)
    model.clear()
    device = CpuDevice()
    try:
        outputs = Executor(lower(programs, alternate(programs)), device, EventTable(device)).run(inputs, enter)
    finally:
        device.close()
    check_outputs(outputs, expected, prompt.truth)


@both
def test_a_rank_may_have_no_tokens(ranks: Ranks, make: Callable[[], Dispatcher]) -> None:
    ranks.run(overlap_without_tokens, make)


def check_schedule(make: Callable[[], Dispatcher]) -> None:
    program, _ = connect(make, ReferenceModel(experts=EXPERTS))
    schedule = lower([program] * 2, alternate([program] * 2))
    validate(schedule)
    if make is all_gather:
        assert "sizes" not in {op.name for op in program.ops}
        validate(schedule, capture=True)
    else:
        assert {op.name for op in program.ops if op.host_sync} == {"dispatch"}
        with pytest.raises(ScheduleError, match=r"rule 8, instruction \d+: L0\.dispatch/0 blocks the host"):
            validate(schedule, capture=True)


@both
def test_only_a_dispatch_whose_sizes_are_known_can_be_captured(ranks: Ranks, make: Callable[[], Dispatcher]) -> None:
    ranks.run(check_schedule, make)


def test_the_reference_program_is_the_reference_forward_and_needs_its_micro_batches_in_order() -> None:
    model = ReferenceModel(hidden=HIDDEN, experts=EXPERTS)
    program = record_program(ReferenceAdapter(), model, ToyCollectives())  # which decompose nothing: one rank
    prompt = draw_prompt(model, 12, seed=0)
    inputs = prompt.cut([7, 5])
    assert find_error(run_sequential([program] * 2, inputs), prompt.truth) < 1e-5
    model.clear()
    assert find_error(run_sequential([program] * 2, inputs[::-1])[::-1], prompt.truth) > 0.1
