"""What goes wrong in a split step is named, and serving goes on; what runs unsplit is counted, and logged once."""

from __future__ import annotations

import linecache
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_runtime.engine.executor_cache import ExecutorCache
from dbo_runtime.engine.statistics import Statistics
from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.engine import Engine, find_difference, make_prompt

PROMPTS = [make_prompt(64, 1), make_prompt(64, 2)]


class BrokenKernelError(RuntimeError):
    """An error that only this test raises."""


@pytest.fixture
def forward(one_rank: Engine) -> Iterator[SplitForward]:
    """Return the forward of the served model; afterwards nothing is left over and the settings are the usual ones."""
    yield one_rank.runner.get_model().forward
    one_rank.abort_all()
    one_rank.configure()
    one_rank.cut_by_settings()


def fail_on_call(number: int, function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return *function*, but for its *number*-th call (from 1 on), which raises."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return function(*args, **kwargs)

    return call


def find_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("dbo-")}


def assert_serves_on(engine: Engine, threads: set[threading.Thread]) -> None:
    """Generate split and unsplit again, on the same threads, and compare."""
    engine.abort_all()
    engine.configure(DBO_MODE="off")
    unsplit = engine.generate(PROMPTS)
    engine.configure()
    before = engine.count_split()
    assert engine.generate(PROMPTS) == unsplit
    assert engine.count_split() == before + 1
    assert find_threads() == threads
    assert all(thread.is_alive() for thread in threads)


def test_an_op_that_raises_is_named_and_serving_goes_on(one_rank: Engine, forward: SplitForward) -> None:
    one_rank.generate(PROMPTS)  # all threads are there
    threads = find_threads()
    mlp = one_rank.runner.get_model().model.layers[1].mlp
    error = BrokenKernelError("no such kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "forward", fail_on_call(2, mlp.forward, error))  # micro-batch 0 runs it first
        with pytest.raises(BrokenKernelError, match="no such kernel") as raised:
            one_rank.generate(PROMPTS)
    assert raised.value is error
    (note,) = raised.value.__notes__
    found = re.fullmatch(
        r"while running op 'moe', layer 1, micro-batch 1, lane 'compute', declared at (.+layers\.py):(\d+)", note
    )
    assert found is not None, note
    assert 'p.compute("moe"' in linecache.getline(found[1], int(found[2]))
    assert_serves_on(one_rank, threads)


def test_a_reduce_that_raises_on_its_own_thread_is_named_and_serving_goes_on(
    one_rank: Engine, forward: SplitForward
) -> None:
    one_rank.generate(PROMPTS)
    threads = find_threads()
    reduce = next(op.fn for op in forward.runtime.program.ops if op.name == "attn_reduce")
    error = ConnectionError("the peer is gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce.__self__, "_process_group", object())  # one rank has none, and so reduces nothing
        patch.setattr(dist, "all_reduce", fail_on_call(4, lambda x, group: None, error))
        with pytest.raises(ConnectionError, match="the peer is gone") as raised:
            one_rank.generate(PROMPTS)
    assert raised.value is error
    (note,) = raised.value.__notes__
    assert re.match(r"while running op 'mlp_reduce', layer 0, micro-batch 1, lane 'comm', declared at .+\.py:\d+", note)
    assert_serves_on(one_rank, threads)


def test_a_failed_step_is_counted_neither_as_split_nor_as_declined(one_rank: Engine, forward: SplitForward) -> None:
    attention = one_rank.runner.get_model().model.layers[2].self_attn
    before = one_rank.statistics()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "forward", fail_on_call(1, attention.forward, BrokenKernelError("once")))
        with pytest.raises(BrokenKernelError):
            one_rank.generate(PROMPTS)
    assert one_rank.statistics() == before


def test_the_check_finds_an_op_that_errs_in_one_micro_batch(
    one_rank: Engine, forward: SplitForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = one_rank.runner.get_model().model.layers[1].mlp
    compute, calls = mlp.forward, []

    def err(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return compute(x) + (0.5 if len(calls) == 2 else 0.0)

    monkeypatch.setattr(mlp, "forward", err)
    one_rank.configure(DBO_CHECK="1")
    with pytest.raises(SplitError) as raised:
        one_rank.generate(PROMPTS)
    assert calls == [64, 64, 128]  # both micro-batches, then unsplit
    figure = r"[0-9.e+-]+"
    assert re.match(
        rf"split and unsplit hidden states differ by {figure} of the largest value \(allowed {figure}; 64 of 128 "
        r"tokens differ by more\) with cuts at \[64\], "
        r"schedule [0-9a-f]{16}\. .*DBO_MODE=off",
        str(raised.value),
    )


def test_the_check_finds_attention_metadata_of_the_wrong_micro_batch(
    one_rank: Engine, forward: SplitForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decode, that is: each request then reads what it needs from the cache, and finds it by its metadata."""
    splitter = forward.decider.splitter
    split = splitter.split
    monkeypatch.setattr(splitter, "split", lambda context, slices, sizes: split(context, slices)[:1] * len(slices))
    one_rank.configure(DBO_CHECK="1")
    with pytest.raises(SplitError, match=r"micro-batch 1 of tokens .* that does not fit"):
        one_rank.generate(PROMPTS, 2)


def test_the_check_finds_wrong_positions_and_names_all_cuts(
    one_rank: Engine, forward: SplitForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = one_rank.runner.get_model().model.layers[0].self_attn
    attend = attention.forward

    def shift(positions: torch.Tensor, *args: Any) -> torch.Tensor:
        return attend(positions.flip(0) if positions.shape[0] < 128 else positions, *args)

    monkeypatch.setattr(attention, "forward", shift)
    one_rank.configure(DBO_CHECK="1")
    one_rank.cut_at(32, 64, 96)
    with pytest.raises(SplitError, match=r"with cuts at \[32, 64, 96\]"):
        one_rank.generate(PROMPTS)


def test_the_check_passes_where_nothing_is_wrong_and_results_are_close(one_rank: Engine, forward: SplitForward) -> None:
    expected = one_rank.generate(PROMPTS, 4)
    one_rank.configure(DBO_CHECK="1")
    before = one_rank.count_split()
    checked = one_rank.generate(PROMPTS, 4)
    assert [answer.tokens for answer in checked] == [answer.tokens for answer in expected]
    assert find_difference(expected, checked) <= 1e-4  # the cache is the unsplit step's, which rounds in another shape
    assert one_rank.count_split() == before + 4


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **figures: Any) -> None:
        self.lines.append((event, figures))


@pytest.fixture
def lines(forward: SplitForward, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Let the runtime begin to count, and to tell, anew."""
    log = Lines()
    monkeypatch.setattr(forward.runtime, "statistics", Statistics())
    monkeypatch.setattr(forward.runtime, "log", log)
    monkeypatch.setattr(
        forward.runtime, "_executors", ExecutorCache(forward.runtime.device, log, 1, forward.runtime.events)
    )
    return log.lines


def test_splits_and_declines_are_counted_and_each_reason_is_told_of_once(
    one_rank: Engine, lines: list[tuple[str, dict[str, Any]]]
) -> None:
    one_rank.generate(PROMPTS[:1], 4)  # the prompt is cut inside; a decode of one token cannot be
    assert one_rank.statistics() == [
        {"split": 1, "nano": 0, "concurrent": 0, "micro_batches": 2, "declined": {"nowhere to cut": 3}}
    ]
    one_rank.configure(DBO_MODE="off")
    one_rank.generate(PROMPTS, 2)
    one_rank.configure(DBO_MODE="auto")
    one_rank.generate(PROMPTS, 2)
    one_rank.configure()
    one_rank.generate(PROMPTS[:1], 2)
    declined = {"nowhere to cut": 4, "DBO_MODE is off": 2, "no communication to hide": 2}
    assert one_rank.statistics() == [{"split": 2, "nano": 0, "concurrent": 0, "micro_batches": 4, "declined": declined}]
    assert [(event, figures.get("reason"), figures.get("detail")) for event, figures in lines] == [
        ("new plan", None, None),
        ("step not split", "nowhere to cut", "1 requests, 1 tokens"),
        ("step not split", "DBO_MODE is off", None),
        ("step not split", "no communication to hide", "no layer is spread over ranks"),
    ]


def test_each_number_of_micro_batches_is_planned_and_told_of_once(
    one_rank: Engine, lines: list[tuple[str, dict[str, Any]]]
) -> None:
    for _ in range(2):
        one_rank.configure(DBO_MICRO_BATCHES="2")
        one_rank.generate(PROMPTS)
        one_rank.configure(DBO_MICRO_BATCHES="3")
        one_rank.generate(PROMPTS)
    assert one_rank.statistics() == [
        {"split": 4, "nano": 0, "concurrent": 0, "micro_batches": 2 + 3 + 2 + 3, "declined": {}}
    ]
    assert [event for event, _ in lines] == ["new plan", "new plan"]
    two, three = (figures for _, figures in lines)
    assert (two["micro_batches"], three["micro_batches"]) == (2, 3)
    assert two["digest"] != three["digest"]
