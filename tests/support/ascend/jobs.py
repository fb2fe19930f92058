"""What tests ask of an engine inside vllm-ascend, as functions that its process finds by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dbo_runtime.batch import Batch
from tests.support.vllm.engine import Answer, Engine, make_prompt

if TYPE_CHECKING:
    from dbo_runtime.vllm_plugin.step.decision import StepDecider
    from dbo_runtime.vllm_plugin.step.forward import SplitForward

Prompts = Sequence[Sequence[int]]


def answer(
    engine: Engine,
    rank: int,
    prompts: Sequence[Prompts],
    tokens: int = 1,
    cuts: Sequence[Any] | None = None,
    arrive: Sequence[int] = (),
    **settings: str,
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Return this rank's answers to its prompts [ranks][prompts], and what was counted meanwhile on each worker.

    With *cuts* every step is cut there that can be; an empty list: at the settings' own cuts; None: steps run unsplit.
    """
    engine.configure(DBO_MODE="off" if cuts is None else "always", **settings)
    engine.cut_by_settings()
    if cuts:
        engine.cut_at(*cuts)
    return generate(engine, rank, prompts, tokens, arrive)


def answer_in_nano_batches(
    engine: Engine,
    rank: int,
    prompts: Sequence[Prompts],
    tokens: int,
    count: int,
    check: str = "0",
    arrive: Sequence[int] = (),
) -> tuple[list[Answer], list[int]]:
    """Return this rank's answers in nano-batches, and how many steps each worker ran so."""
    before = engine.statistics()
    engine.configure(DBO_MODE="always", DBO_SPLIT="nano", DBO_MICRO_BATCHES=str(count), DBO_CHECK=check)
    engine.cut_by_settings()
    found = engine.generate(prompts[rank], tokens, arrive)
    engine.configure(DBO_MODE="always")
    return found, [after["nano"] - early["nano"] for after, early in zip(engine.statistics(), before, strict=True)]


def answer_in_micro_batches(
    engine: Engine, rank: int, prompts: Sequence[Prompts], tokens: int, check: str = "0"
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Return this rank's answers in micro-batches, wherever settings cut, and what was counted on each worker."""
    return answer(engine, rank, prompts, tokens, [], DBO_SPLIT="micro", DBO_CHECK=check)


def answer_watched(
    engine: Engine, rank: int, prompts: Sequence[Prompts], tokens: int, cuts: Sequence[Any]
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Answer while the sanitizer watches, which raises an error if it finds something."""
    return answer(engine, rank, prompts, tokens, cuts, DBO_CHECK="races")


def answer_as_they_come(
    engine: Engine,
    rank: int,
    prompts: Sequence[Prompts],
    tokens: int,
    cuts: Sequence[Any] | None,
    arrive: Sequence[Sequence[int]],
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Answer prompts of which each comes when so many steps are done [ranks][prompts]."""
    return answer(engine, rank, prompts, tokens, cuts, arrive[rank])


def answer_in_chunks(engine: Engine, rank: int, prompts: Sequence[Prompts], chunk: int) -> list[Answer]:
    """Return answers that vllm-ascend computes unsplit, in steps of at most *chunk* tokens."""
    engine.configure(DBO_MODE="off")
    engine.cut_by_settings()
    return engine.generate_in_chunks(prompts[rank], chunk)


def subtract(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return how far counts have gone."""
    declined = {why: n - before["declined"].get(why, 0) for why, n in after["declined"].items()}
    return {"split": after["split"] - before["split"], "declined": {why: n for why, n in declined.items() if n}}


def make_prompts(*lengths: int) -> list[list[int]]:
    """Return a prompt of each length, all different."""
    return [make_prompt(length, length) for length in lengths]


def cut_at_boundaries(engine: Engine, rank: int) -> None:
    """Cut every step at the boundary between requests that is nearest to its middle, until told otherwise."""
    engine.configure(DBO_MODE="always")
    engine.llm.collective_rpc(_cut_at_boundaries)


def _cut_at_boundaries(worker: Any) -> None:
    find_decider(worker).choose_cuts = find_middle_boundary


def find_middle_boundary(batch: Batch) -> list[int]:
    """Return the boundary nearest to the middle of a batch, if it has more than one request."""
    boundaries = list(accumulate(batch.query_lens))[:-1]
    return sorted(boundaries, key=lambda cut: abs(2 * cut - batch.tokens))[:1]


def find_decider(worker: Any) -> StepDecider:
    """Return what decides on a worker's steps."""
    forward: SplitForward = worker.model_runner.get_model().forward
    return forward.decider


def count_divided(engine: Engine, rank: int) -> list[int]:
    """Return the number of ops that are divided in nano-batches, on each worker."""
    found: list[int] = engine.llm.collective_rpc(_count_divided)
    return found


def _count_divided(worker: Any) -> int:
    forward: SplitForward = worker.model_runner.get_model().forward
    return sum(op.divided is not None for op in forward.runtime.program.ops)


def generate(
    engine: Engine, rank: int, prompts: Sequence[Prompts], tokens: int, arrive: Sequence[int] = ()
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Return this rank's answers with the settings as they are, and what was counted meanwhile on each worker."""
    before = engine.statistics()
    found = engine.generate(prompts[rank], tokens, arrive)
    return found, [subtract(after, early) for after, early in zip(engine.statistics(), before, strict=True)]


def answer_by_all_to_all(
    engine: Engine, rank: int, prompts: Sequence[Prompts], cuts: Sequence[Any] | None
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Answer where vllm-ascend chooses to send tokens to experts by all-to-all, whatever their number."""
    engine.llm.collective_rpc(choose_all_to_all)
    try:
        found = answer(engine, rank, prompts, 1, cuts)
    finally:
        calls = engine.llm.collective_rpc(end_choosing)
    assert all(calls), "vllm-ascend's own choice was taken"
    return found


def choose_all_to_all(worker: Any) -> None:
    """Let vllm-ascend choose all-to-all in a worker, and count that, until `end_choosing`."""
    from vllm_ascend import ascend_forward_context as contexts
    from vllm_ascend.worker import model_runner_v1 as runner

    worker.chosen, worker.choosing = 0, ExitStack()

    def choose(*arguments: Any, **options: Any) -> Any:
        worker.chosen += 1
        return contexts.MoECommType.ALLTOALL

    for module in (contexts, runner):
        worker.choosing.enter_context(patch.object(module, "select_moe_comm_method", choose))


def end_choosing(worker: Any) -> int:
    """Let vllm-ascend choose by itself again; return how often it did not."""
    worker.choosing.close()
    return int(worker.chosen)


def order_corrections(engine: Engine, rank: int) -> None:
    """Let the host correct what it assumed of drafts only when the device has copied it: vllm-ascend does not wait."""
    engine.llm.collective_rpc(_order_corrections)


def _order_corrections(worker: Any) -> None:
    runner = worker.model_runner
    update = runner._update_states

    def update_states(scheduled: Any) -> Any:
        correct = update(scheduled)
        return correct and partial(_correct_after_copies, runner.prepare_inputs_event, correct)

    runner._update_states = update_states


def _correct_after_copies(copied: Any, correct: Callable[[], None]) -> None:
    copied.synchronize()
    correct()
