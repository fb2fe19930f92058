"""Context parallel sparse attention (DSA-CP) inside vllm-ascend: split steps give what its own steps give, to the bit.

Each tensor parallel rank attends from a chunk of the tokens. Ranks gather keys, and the weights of the last projection;
in steps of decodes they exchange tokens for heads instead. Each test takes five to seven minutes on two busy cores.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.support.ascend.context_parallel import (
    ARRIVE,
    SHARED_OUT,
    answer_without,
    derive_states,
    list_unsupported,
    share_builders,
    share_out_tokens,
)
from tests.support.ascend.drafts import assert_drafts_are_equal
from tests.support.ascend.engines import FOUR, OPTIONS, PIPELINE, start
from tests.support.ascend.jobs import Prompts, answer, answer_in_nano_batches, cut_at_boundaries, generate, make_prompts
from tests.support.ascend.modelslim import DYNAMIC, INT4, STATIC, quantize_model
from tests.support.ascend.mtp_layers import DRAFTS, add_mtp_layer
from tests.support.ascend.sparse_attention import (
    GLM,
    QUANTIZED,
    SHARING,
    V32,
    assert_steps_are_equal,
    share_rows,
)
from tests.support.ascend.traps import keep_rotary_tables
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.families import make_family
from tests.support.vllm.ranks import Ranks

pytestmark = pytest.mark.slow
ROUNDING = 0.25  # of log-probabilities, from bfloat16: chunks are projected whole, not by parts that are added
PASSED_ON = "stages of a pipeline pass on which keys sparse attention has chosen"
STAGED = "not supported yet: FlashComm in a pipeline with vllm-ascend 0.23"
IN_STAGES = {V32: [], GLM: [PASSED_ON]} if find_release() == LATEST_ASCEND else {V32: [STAGED], GLM: [STAGED]}
DECODES = [make_prompts(40, 30, 20, 10, 5, 50)]


def generate_unsplit(engine: Engine, rank: int, prompts: Prompts) -> list[Answer]:
    """Return answers of a model that may have no statistics, as it is not split."""
    engine.configure(DBO_MODE="off")
    return engine.generate(prompts, 1)


def assert_decodes_are_equal(npus: Ranks) -> None:
    """Compare steps of decodes, of which each micro-batch exchanges tokens for heads, with unsplit ones."""
    ((unsplit, _),) = npus.run(answer, DECODES, 4)
    npus.run(cut_at_boundaries)
    ((split, counts),) = npus.run(generate, DECODES, 4)
    assert all(count["split"] >= 4 for count in counts), counts
    assert find_difference(unsplit, split) == 0.0


@pytest.mark.parametrize("name", [V32, GLM])
def test_split_steps_are_equal_to_unsplit_ones(name: str, tmp_path: Path) -> None:
    for npus in start(1, make_family(name, tmp_path, **(SHARING if name == GLM else {})), **SHARED_OUT):
        assert npus.run(share_out_tokens) == [True]
        assert npus.run(list_unsupported, 1) == [[]]
        assert npus.run(list_unsupported, 2) == [IN_STAGES[name]]
        assert_decodes_are_equal(npus)
        assert_steps_are_equal(npus)


@pytest.mark.parametrize(
    ("name", "attention", "experts"), [(V32, STATIC, DYNAMIC), (V32, DYNAMIC, DYNAMIC), (GLM, DYNAMIC, INT4)]
)
def test_quantized_weights(name: str, attention: str, experts: str, tmp_path: Path) -> None:
    sizes = SHARING if name == GLM else {}
    model = quantize_model(make_family(name, tmp_path / "source", **sizes), tmp_path / "model", attention, experts)
    for npus in start(1, model, **SHARED_OUT, **QUANTIZED):
        assert_decodes_are_equal(npus)
        assert_steps_are_equal(npus)


@pytest.mark.parametrize("name", [V32, GLM])
def test_stages_of_a_pipeline(name: str, tmp_path: Path) -> None:
    """Layers pass on all tokens there: attention gathers what each rank has computed."""
    for npus in start(1, make_family(name, tmp_path), FOUR, **SHARED_OUT, **PIPELINE):
        assert npus.run(share_out_tokens) == [True]
        assert_decodes_are_equal(npus)
        assert_steps_are_equal(npus)


def test_vllm_ascends_own_stages_that_share_chosen_keys_are_wrong(tmp_path: Path) -> None:
    """Each rank hands on the keys of its chunk of the tokens as if they were the same on all.

    Nano-batches do not change that: attention has the chunks of the whole step.
    """
    model, prompts = make_family(GLM, tmp_path, **SHARING), make_prompts(40, 30, 90)
    whole = {**SHARED_OUT, "additional_config": OPTIONS["additional_config"]}
    runs = (whole, {**whole, **PIPELINE}, SHARED_OUT, {**SHARED_OUT, **PIPELINE})
    one, two, chunks, stages = (
        npus.run(generate_unsplit, prompts)[0] for options in runs for npus in start(1, model, FOUR, **options)
    )
    assert find_difference(one, two) == 0.0
    assert find_difference(one, chunks) < ROUNDING < find_difference(one, stages)
    for npus in start(1, model, {**FOUR, "DBO_SPLIT": "auto"}, **SHARED_OUT, **PIPELINE):
        ((nano, steps),) = npus.run(answer_in_nano_batches, [prompts], 1, 2)
        assert min(steps) == 1, steps
        assert find_difference(stages, nano) == 0.0


@pytest.mark.parametrize("name", [V32, GLM])
def test_drafts_are_verified_by_chunks(name: str, tmp_path: Path) -> None:
    model = add_mtp_layer(make_family(name, tmp_path, **(SHARING if name == GLM else {})))
    for npus in start(1, model, **SHARED_OUT, **DRAFTS):
        assert_drafts_are_equal(npus)


def test_without_a_remedy_answers_are_wrong(tmp_path: Path) -> None:
    """Cut between requests, of which some decode while others are prefilled."""
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), **SHARED_OUT):
        ((unsplit, _),) = npus.run(answer, DECODES, 4, None, ARRIVE)
        for remove in (nullcontext, keep_rotary_tables, share_rows, share_builders, derive_states, nullcontext):
            ((split, steps),) = npus.run(answer_without, remove, DECODES)
            assert steps[0]["split"] >= 4, steps
            assert (find_difference(unsplit, split) > 0.0) == (remove is not nullcontext), remove
