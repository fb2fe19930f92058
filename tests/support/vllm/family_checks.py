"""The comparison that every family of models passes, and the families that pass it in one place."""

from __future__ import annotations

from dbo_runtime.adapters.registry import get_backbone_adapter
from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.equivalence import MIXED, assert_close, get_unsplit, run_cut, run_in_nano_batches, run_unsplit
from tests.support.vllm.families import FAMILIES, LINEAR_ATTENTION, ONLY_BFLOAT16, SPARSE_ATTENTION

# The tutorial's adapter, or none; test_linear_attention.py, test_bfloat16.py; tests/ascend/test_sparse_attention.py.
ELSEWHERE = {"GraniteForCausalLM", *LINEAR_ATTENTION, *ONLY_BFLOAT16, *SPARSE_ATTENTION}
OURS = tuple(name for name in FAMILIES if name not in ELSEWHERE)
# One architecture for each adapter. tests/lab/verify/test_forms.py verifies all of them op by op, without engines.
FORMS = tuple({type(get_backbone_adapter(name)): name for name in reversed(OURS)}.values())
LENGTHS = (96, 64, 160, 128, 80)
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
PREFILL_CUTS = [(96,), (320,), (17,), (263,), (96, 160, 320), (132, 264, 396)]
MIXED_CUTS = [(1,), (2, 4), (40,), (2, 162)]


def assert_split_answers_as_unsplit(engine: Engine) -> None:
    """Compare prefills, and steps that mix prefill and decode, at several cuts and in nano-batches.

    The ops of the adapter say which of them are token-wise.
    """
    assert_cuts_answer_as_unsplit(engine)
    mixed = get_unsplit(engine, PROMPTS, 6, MIXED)
    assert_close(mixed, run_in_nano_batches(engine, PROMPTS, 6, MIXED, DBO_MICRO_BATCHES="3"))
    engine.configure()


def assert_cuts_answer_as_unsplit(engine: Engine) -> None:
    """Compare the same steps at several cuts."""
    unsplit = run_unsplit(engine, PROMPTS)
    for cuts in PREFILL_CUTS:
        assert_close(unsplit, run_cut(engine, cuts, PROMPTS))
    mixed = get_unsplit(engine, PROMPTS, 6, MIXED)
    for cuts in MIXED_CUTS:
        assert_close(mixed, run_cut(engine, cuts, PROMPTS, 6, MIXED))
    engine.configure(DBO_CHECK="races")  # which says nothing of what is right
    assert_close(mixed, run_cut(engine, MIXED_CUTS[1], PROMPTS, 6, MIXED))
    engine.configure()
