"""Speculative decoding: the target's forward is split, the drafter's is not, and both answer as unsplit ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.forward_context import get_forward_context

from dbo_runtime.planner.costs.cost_file import load_costs
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.unsupported import list_unsupported
from examples.tiny_tasks import held_out
from tests.support.ascend.mtp_layers import MTP, add_mtp_layer
from tests.support.vllm.costs import calibrate_few, forget_costs
from tests.support.vllm.drafters import (
    NGRAM,
    draft_by_eagle,
    draft_by_eagle3,
    draft_by_head_of,
    draft_by_model,
    draft_by_mtp,
)
from tests.support.vllm.engine import Engine
from tests.support.vllm.engines import NO_SETTINGS, TINY, Engines, share_cores
from tests.support.vllm.expert_parallel import ARRIVALS, assert_few_tokens_are_padded, assert_split_is_close
from tests.support.vllm.families import make_family
from tests.support.vllm.speculation import (
    LENGTHS,
    MIXED,
    PROMPTS,
    TASKS,
    TOKENS,
    answer_tasks,
    assert_split_drafts_alike,
    assert_steps_check,
    generate,
)

pytestmark = pytest.mark.vllm

CHUNK = 128  # tokens that a step may have where prompts are prefilled in chunks
LLAMA = {"attention_backend": "CPU_ATTN", "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def mtp(engines: Engines) -> Engine:
    return engines.get(1, "nobind", **draft_by_mtp(2))


@pytest.fixture(scope="module")
def eagle3(engines: Engines) -> Engine:
    """Return an engine of two ranks."""
    return engines.get(2, share_cores(), **draft_by_eagle3(3))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


# Where requests end: in the prefill at 96, in decodes at multiples of 3.
@pytest.mark.parametrize("cuts", [None, (96,), (17,), (3,), (6, 9)], ids=str)
def test_an_mtp_layer_drafts_and_is_verified_alike(mtp: Engine, cuts: tuple[int, ...] | None) -> None:
    assert_split_drafts_alike(mtp, cuts)


def test_the_check_passes_where_a_layer_drafts(mtp: Engine) -> None:
    assert_steps_check(mtp)


@pytest.mark.slow
def test_with_a_drafter_that_is_new_the_first_steps_are_compared(engines: Engines) -> None:
    """Its method does not matter to the model's own forward."""
    extension = "tests.support.vllm.unknown_drafters.Extension"
    with engines.start(1, "nobind", TINY, worker_extension_cls=extension, **draft_by_mtp(2)) as engine:
        assert_split_drafts_alike(engine, None)
        assert engine.llm.collective_rpc("tell_first_steps") == [(True, None)]


def test_only_the_model_is_split_and_the_drafter_is_given_whole_batches(mtp: Engine) -> None:
    model, drafter = mtp.runner.get_model(), mtp.runner.drafter.model
    assert isinstance(model.forward, SplitForward)
    forward, seen = drafter.forward, []

    def look(*args: Any, **given: Any) -> Any:
        own = [metadata.num_actual_tokens for name, metadata in get_forward_context().attn_metadata.items()]
        seen.append((set(own), given["positions"].shape[-1]))
        return forward(*args, **given)

    with patch.object(drafter, "forward", look):
        _, _, steps = generate(mtp, "always", tokens=4, arrive=(0,) * len(MIXED))
    assert steps > 0
    assert max(tokens for _, tokens in seen) > sum(LENGTHS), "all prompts at once, though the step was split"
    assert all(own == {tokens} for own, tokens in seen)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "eagle3"])
def test_costs_are_measured_and_planned_by_where_a_model_drafts(
    drafter: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Hidden states that an Eagle3 head reads are written by ops of one name."""
    engine: Engine = request.getfixturevalue(drafter)
    digests = {digest for _, digest in engine.llm.collective_rpc(calibrate_few, args=(str(tmp_path / "costs.json"),))}
    table = load_costs(tmp_path / "costs.json")
    assert digests == {table.digest}
    assert ("auxiliary" in table.ops) == (drafter == "eagle3")
    try:
        assert_split_drafts_alike(engine)
        engine.generate(PROMPTS)
        assert engine.llm.collective_rpc("dbo_last_step")[0]["expected"] is not None
    finally:
        engine.llm.collective_rpc(forget_costs)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [None, (17,), (4, 12)], ids=str)
def test_a_head_that_reads_hidden_states_between_layers_drafts_alike(
    eagle3: Engine, cuts: tuple[int, ...] | None
) -> None:
    assert_split_drafts_alike(eagle3, cuts)


@pytest.mark.slow
def test_the_check_compares_what_the_head_reads(eagle3: Engine) -> None:
    assert_steps_check(eagle3)


@pytest.mark.parametrize("count", [10, pytest.param(125, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["mtp", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_most_drafts_are_accepted_and_as_many_split_as_unsplit(
    drafter: str, count: int, request: pytest.FixtureRequest
) -> None:
    """Of trained drafters, on held-out tasks: *count* requests of each of four kinds."""
    engine: Engine = request.getfixturevalue(drafter)
    tasks = held_out(count)
    unsplit, drafts = answer_tasks(engine, tasks, "off")
    split, split_drafts = answer_tasks(engine, tasks, "always")
    assert split == unsplit
    assert split_drafts == drafts
    assert drafts["accepted"] > drafts["drafted"] / 2
    right = sum(answer == task.answer for answer, task in zip(split, tasks, strict=True))
    assert right >= 0.98 * len(tasks)


@pytest.mark.slow
def test_answers_are_those_without_drafts(mtp: Engine, one_rank: Engine) -> None:
    plain = one_rank.generate([*PROMPTS, *TASKS], TOKENS, MIXED)
    drafted, counts, _ = generate(mtp, "off")
    assert counts["drafted"] > counts["accepted"] > 0
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "ranks"),
    [("ngram", 1), ("ngram", 2), ("mtp 1", 2), ("mtp 3", 1), ("eagle3", 1), ("eagle", 1), ("eagle", 2)],
)
def test_every_drafter_of_the_tiny_model_leaves_split_steps_alike(
    drafter: str, ranks: int, engines: Engines, tmp_path: Path
) -> None:
    options = {
        "ngram": lambda: {"speculative_config": NGRAM},
        "mtp 1": lambda: draft_by_mtp(1),
        "mtp 3": lambda: draft_by_mtp(3),
        "eagle3": lambda: draft_by_eagle3(2),
        "eagle": lambda: draft_by_eagle(2, tmp_path),
    }[drafter]()
    with start(engines, ranks, **options) as engine:
        for cuts in (None, (96,), (17,), (4,), (6, 160)):
            assert_split_drafts_alike(engine, cuts)
        assert_steps_check(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "ranks"), [("ngram", 2), ("itself", 1), ("another model", 2), ("eagle3", 1), ("eagle3", 2)]
)
def test_drafts_are_verified_alike_while_prompts_are_prefilled_in_chunks(
    drafter: str, ranks: int, engines: Engines, llama: Path, tmp_path: Path
) -> None:
    """Of a Llama: vLLM's CPU build prefills latent attention undivided."""
    options = {
        "ngram": lambda: {"speculative_config": NGRAM},
        "itself": lambda: draft_by_model(3, llama),
        "another model": lambda: draft_by_model(3, make_family("LlamaForCausalLM", tmp_path, seed=1)),
        "eagle3": lambda: draft_by_head_of(2, tmp_path, llama),
    }[drafter]()
    with start(engines, ranks, llama, **LLAMA, max_num_batched_tokens=CHUNK, **options) as engine:
        for cuts in (None, (16,), (50,), (4,), (8, 64)):
            assert_split_drafts_alike(engine, cuts)
        assert_steps_check(engine)
        _, counts, steps = generate(engine, "always")
        assert steps > len(PROMPTS), "each prompt is longer than a chunk, or shares one"
        if drafter == "itself":
            assert counts["accepted"] == counts["drafted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_mtp_layer_of_glm_drafts_and_is_verified_alike(ranks: int, engines: Engines, tmp_path: Path) -> None:
    model = add_mtp_layer(make_family("Glm4MoeForCausalLM", tmp_path))
    drafts = {"speculative_config": {**MTP["speculative_config"], "attention_backend": "CPU_ATTN"}}
    with start(engines, ranks, model, **LLAMA, **drafts) as engine:
        for cuts in (None, (96,), (17,), (4,)):
            assert_split_drafts_alike(engine, cuts)
        assert_steps_check(engine)


@pytest.mark.slow
def test_data_parallel_ranks_verify_drafts_alike_with_experts_on_both(engines: Engines) -> None:
    """Ranks agree on cuts by numbers of tokens alone, so decodes with drafts are cut inside, too."""
    with engines.start_ranks(2, max_num_batched_tokens=2048, **draft_by_mtp(1)) as ranks:
        for cuts in (None, [[96], [32]], [[17], [449]]):
            assert_split_is_close(ranks, cuts)
        for cuts in (None, [[2], [2]], [[1], [3]], [[40], [20]]):
            assert_split_is_close(ranks, cuts, 6, ARRIVALS)
        assert_few_tokens_are_padded(ranks)  # an idle rank has as many tokens as a decode with drafts


@pytest.mark.slow
def test_a_head_for_a_model_of_another_size_is_declined_at_start(engines: Engines, llama: Path, tmp_path: Path) -> None:
    options = draft_by_head_of(2, tmp_path, llama, hidden=64)
    with start(engines, 1, llama, **LLAMA, **options) as engine:
        assert engine.llm.collective_rpc("dbo_statistics") == [None]
        assert engine.llm.collective_rpc(tell_declines) == [
            ["the drafter is one for another model (it reads 64 values a token, the model has 128)"]
        ]


def tell_declines(worker: Any) -> list[str]:
    """Return why no step is split, as it is known from the configuration."""
    return [str(decline) for decline in list_unsupported(worker.vllm_config)]


def start(engines: Engines, ranks: int, *model: Path, **options: Any) -> Any:
    cores = share_cores() if ranks == 2 else "nobind"
    return engines.start(ranks, cores, *(model or (TINY,)), NO_SETTINGS, **options)
