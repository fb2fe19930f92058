"""Each form of adapter, end to end: the real vLLM, two ranks, split and unsplit.

Architectures that share an adapter share its engine here; `tests/lab/verify/test_forms.py` verifies each op by op.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dbo_runtime.adapters.registry import GROUP
from tests.support.vllm.engine import Engine
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.expert_parallel import (
    ARRIVALS,
    EDGES,
    FEW,
    LONG,
    assert_answers_are_close,
    assert_few_tokens_are_padded,
    assert_split_is_close,
    generate,
)
from tests.support.vllm.families import (
    LINEAR_ATTENTION,
    MINIMAX_M3,
    OF_ASCEND,
    ONLY_BFLOAT16,
    SPARSE_ATTENTION,
    find_backend,
    make_family,
)
from tests.support.vllm.family_checks import FORMS, OURS, assert_split_answers_as_unsplit
from tests.support.vllm.multimodal_families import GEMMA4, INTERNVL, OMNI, make_gemma4, make_internvl
from tests.support.vllm.vision_families import KIMI, QWEN3, QWEN3_MOE, QWEN25, QWEN35, QWEN35_MOE, make_kimi


@pytest.fixture(scope="module", params=FORMS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: Engines
) -> Iterator[Engine]:
    model = make_family(request.param, tmp_path_factory.mktemp(request.param))
    options = {"enable_prefix_caching": False, "attention_backend": find_backend(request.param)}
    with engines.start(2, share_cores(), model, **options) as engine:
        yield engine


@pytest.mark.vllm
@pytest.mark.slow
def test_split_steps_answer_as_unsplit_ones(family: Engine) -> None:
    """One test a family, so that one engine serves all of it."""
    assert_split_answers_as_unsplit(family)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["Qwen3MoeForCausalLM", "Gemma4ForCausalLM", "Glm4MoeForCausalLM", "MixtralForCausalLM", "MiniMaxM2ForCausalLM"],
)
def test_tokens_of_each_moe_are_dispatched_to_experts_on_other_ranks(
    name: str, tmp_path: Path, engines: Engines
) -> None:
    """The gate is the experts' own, or the block's, or reads other hidden states than they do."""
    options = {"attention_backend": find_backend(name), "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    with engines.start_ranks(2, make_family(name, tmp_path), **options) as ranks:
        assert_split_is_close(ranks, [[EDGES[0][1]], [EDGES[1][2]]])
        assert_split_is_close(ranks, [[100, 300], [60, 200]])
        assert_split_is_close(ranks, [[2], [3]], 6, ARRIVALS)
        assert_few_tokens_are_padded(ranks)


@pytest.mark.vllm
@pytest.mark.slow
def test_ranks_with_few_tokens_are_padded_with_prefix_caching(tmp_path: Path, engines: Engines) -> None:
    """The second time all but the last tokens of the long prompt are cached."""
    name = "Qwen3MoeForCausalLM"
    options = {"attention_backend": find_backend(name), "enable_prefix_caching": True, "max_num_batched_tokens": 2048}
    with engines.start_ranks(2, make_family(name, tmp_path), **options) as ranks:
        for few in FEW.values():
            answers = []
            for mode in ("off", "always", "always"):
                if len(answers) < 2:
                    ranks.run(forget_prefixes_on_rank)
                answers.append(ranks.run(generate, mode, None, 2, (), [LONG, few]))
            unsplit, *others = answers
            for split in others:
                for (expected, _, _), (found, _, _) in zip(unsplit, split, strict=True):
                    assert_answers_are_close(expected, found)
            assert [count for _, count, _ in others[0]] == [1 + (len(few) > 1)] * 2


def forget_prefixes_on_rank(engine: Engine, rank: int) -> None:
    assert engine.llm.reset_prefix_cache()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"])
def test_sequence_parallel_moe_answers_split_as_unsplit(name: str, tmp_path: Path, engines: Engines) -> None:
    """Blocks that chunk tokens themselves, and blocks that do not; sizes are odd and even.

    It takes two to three minutes a model on two cores.
    """
    options = {"attention_backend": find_backend(name), "enable_prefix_caching": False, "tensor_parallel_size": 2}
    with engines.start_ranks(2, make_family(name, tmp_path), **options) as ranks:
        assert_split_is_close(ranks, [[EDGES[0][1]], [EDGES[1][2]]])
        assert_split_is_close(ranks, [[101, 300], [60, 201]])
        assert_split_is_close(ranks, [[2], [3]], 6, ARRIVALS)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_language_model_of_kimi_answers_split_as_unsplit(tmp_path: Path, engines: Engines) -> None:
    """Served without its encoder, which is not split."""
    options = {"enable_prefix_caching": False, "language_model_only": True}
    with engines.start(2, share_cores(), make_kimi(tmp_path / "kimi"), **options) as engine:
        assert_split_answers_as_unsplit(engine)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_language_model_of_gemma_4_answers_split_as_unsplit(tmp_path: Path, engines: Engines) -> None:
    """As above."""
    options = {"enable_prefix_caching": False, "language_model_only": True, "attention_backend": "CPU_ATTN"}
    with engines.start(2, share_cores(), make_gemma4(tmp_path / "gemma4"), **options) as engine:
        assert_split_answers_as_unsplit(engine)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("language", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_language_model_of_internvl_answers_split_as_unsplit(
    language: str, tmp_path: Path, engines: Engines
) -> None:
    """As above."""
    options = {"enable_prefix_caching": False, "language_model_only": True, "trust_remote_code": True}
    backend = find_backend(language)
    with engines.start(
        2, share_cores(), make_internvl(tmp_path, language), attention_backend=backend, **options
    ) as engine:
        assert_split_answers_as_unsplit(engine)


def test_every_architecture_that_we_register_is_among_them() -> None:
    ours = {entry.name for entry in entry_points(group=GROUP) if entry.value.startswith("dbo_models.")}
    others = {
        *LINEAR_ATTENTION,
        *ONLY_BFLOAT16,
        QWEN35,
        QWEN35_MOE,
        *SPARSE_ATTENTION,
        MINIMAX_M3,
        *OF_ASCEND,
    }  # in files of their own
    multimodal = {GEMMA4, INTERNVL, KIMI, OMNI, QWEN25, QWEN3, QWEN3_MOE}  # four of them in test_qwen_vl.py
    assert ours == {*OURS, *multimodal, *others}


def test_every_adapter_is_short() -> None:
    modules = {entry.value.partition(":")[0] for entry in entry_points(group=GROUP)}
    paths = [
        Path(__file__).parents[3] / "models" / f"{name.rpartition('.')[2]}.py"
        for name in modules
        if "dbo_models" in name
    ]
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 100 for path in paths)
