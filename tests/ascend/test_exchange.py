"""Prefills on A3, whose tokens are exchanged all-to-all: what ran when, and how many bytes were sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tests.support.ascend.engines import TINY, start
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.modelslim import quantize_model
from tests.support.ascend.traced_prefills import SLOW, Instruction, Op, trace_prefill
from tests.support.vllm.engine import Engine

pytestmark = pytest.mark.slow

A3 = {"STANDIN_ASCEND_CHIP": "A3"}
EXPERT_LAYERS = (1, 2)  # the first is dense
EXCHANGE, SIZES = "HcclAlltoAllV", "HcclAlltoAll"
EXCHANGES = {"dispatch": 2, "combine": 1}  # tokens and what is known of them; results
PRODUCTS = 2  # of a layer's experts
LENGTHS = (240, 220)  # so many that experts of both ranks are chosen in each micro-batch
PROMPTS = make_prompts(130, 64, 90)


class Sent(NamedTuple):
    """Bytes that a rank sent to others, by all-to-all.

    Attributes:
        tokens: of tokens, their scales in int8, and the experts' results.
        routing: of what else goes with tokens.
    """

    tokens: int
    routing: int


def test_tokens_of_one_micro_batch_travel_while_the_other_attends_or_runs_experts() -> None:
    """On each rank, in each layer that has experts."""
    for npus in start(1, TINY, A3, tensor_parallel_size=2, enable_expert_parallel=True):
        (ranks,) = npus.run(trace_prefill, {**SLOW, EXCHANGE: 0.1}, LENGTHS)
        for rank in ranks:
            pairs = find_pairs(rank)
            for layer in EXPERT_LAYERS:
                assert {moved[2] for moved, _ in pairs if moved[0] == layer} == {"dispatch", "combine"}, pairs
        assert len({tuple(rank.comm) for rank in ranks}) == 1


def find_pairs(rank: Instruction) -> set[tuple[Op, Op]]:
    """Return (exchange, op) of different micro-batches that ran at the same time."""
    (stream,) = {kernel.stream for kernel in rank.kernels if kernel.name == SIZES}
    exchanges = [kernel for kernel in rank.kernels if (kernel.name, kernel.stream) == (EXCHANGE, stream)]
    moved = [op for op in rank.comm for _ in range(EXCHANGES.get(op[2], 0))]
    attention = [kernel for kernel in rank.kernels if kernel.name == "FusedInferAttentionScore"]
    products = [kernel for kernel in rank.kernels if kernel.name == "GroupedMatmul"]
    work = list(zip([op for op in rank.compute if op[2] == "attention"], attention, strict=True))
    work += zip([op for op in rank.compute if op[2] == "experts" for _ in range(PRODUCTS)], products, strict=True)
    return {
        (sent, op)
        for sent, kernel in zip(moved, exchanges, strict=True)
        for op, computed in work
        if sent[1] != op[1] and kernel.start < computed.end and computed.start < kernel.end
    }


@pytest.mark.parametrize("is_quantized", [False, True], ids=["bf16", "W8A8"])
def test_split_steps_send_no_more_than_vllm_ascends_own(
    is_quantized: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """It sends a token to each of its experts; here two of them on a rank share one row, and have one result."""
    model = quantize_model(TINY, tmp_path / "quantized") if is_quantized else TINY
    options = {"quantization": "ascend"} if is_quantized else {}
    for npus in start(1, model, A3, tensor_parallel_size=2, enable_expert_parallel=True, **options):
        (unsplit,) = npus.run(count_sent, PROMPTS, None)
        (split,) = npus.run(count_sent, PROMPTS, [130])
        for own, ours in zip(unsplit, split, strict=True):
            assert 0 < ours.tokens <= own.tokens
        record_property(
            "bytes of tokens sent by vllm-ascend, and split",
            [(own.tokens, ours.tokens) for own, ours in zip(unsplit, split, strict=True)],
        )


def count_sent(engine: Engine, rank: int, prompts: Sequence[Sequence[int]], cuts: list[int] | None) -> list[Sent]:
    """Prefill in one step, unsplit or cut there, and return the bytes that each worker sent."""
    engine.llm.collective_rpc(_start_counting, args=(cuts is None,))
    _, counts = answer(engine, rank, [prompts], 1, cuts)
    assert [count["split"] for count in counts] == [0 if cuts is None else 1] * len(counts), counts
    sent: list[Sent] = engine.llm.collective_rpc(_end_counting)
    return sent


def _start_counting(worker: Any, counts_all: bool) -> None:
    """Count what goes through all-to-all: everything, or what a `Dispatcher` of this package sends."""
    import torch.distributed as dist

    from dbo_runtime.engine.dispatch import AllToAll

    worker.sent, worker.patches, is_counting = Sent(0, 0), ExitStack(), [counts_all]
    send = dist.all_to_all_single
    hidden_size = worker.vllm_config.model_config.get_hidden_size()

    def count(
        output: Any,
        x: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sent = input_split_sizes
        if is_counting[0] and sent is not None:
            amount = int(sum(sent) - sent[dist.get_rank(group)]) * x[0:1].numel() * x.element_size()
            is_token = x.dim() == 1 or x.shape[-1] == hidden_size  # a row, or its scale
            tokens, routing = worker.sent
            worker.sent = Sent(tokens + amount, routing) if is_token else Sent(tokens, routing + amount)
        return send(output, x, output_split_sizes, sent, group, async_op)

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            is_counting[0] = True
            try:
                return method(*arguments)
            finally:
                is_counting[0] = counts_all

        return run

    worker.patches.enter_context(patch.object(dist, "all_to_all_single", count))
    for name in ("dispatch", "combine"):
        worker.patches.enter_context(patch.object(AllToAll, name, counted(getattr(AllToAll, name))))


def _end_counting(worker: Any) -> Sent:
    worker.patches.close()
    found: Sent = worker.sent
    return found
