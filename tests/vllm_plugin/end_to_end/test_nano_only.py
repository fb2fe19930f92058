"""Models with something that micro-batches do not support are cut into nano-batches only, on the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import TINY, Engines, share_cores
from tests.support.vllm.equivalence import MIXED, PROMPTS, assert_close, assert_close_up_to_ties, run_unsplit
from tests.support.vllm.expert_parallel import ARRIVALS, BATCHES, generate, generate_in_nano_batches
from tests.support.vllm.families import make_family

pytestmark = pytest.mark.vllm

AUTO = {"DBO_SPLIT": "auto"}
UNKNOWN_CONNECTOR = {
    "kv_transfer_config": {
        "kv_connector": "LayerRecorder",
        "kv_connector_module_path": "tests.support.vllm.layer_recorder",
        "kv_role": "kv_both",
    },
    "worker_extension_cls": "tests.support.vllm.layer_recorder.Extension",
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 512,
}


def count_nano(engine: Engine) -> int:
    """Return the number of steps in nano-batches, which is equal on all ranks of a stage; none is split otherwise."""
    found = engine.statistics()
    assert {rank["split"] for rank in found} == {0}
    (count,) = {rank["nano"] for rank in found}
    return int(count)


@pytest.mark.slow
def test_a_connector_that_is_not_known_is_told_what_an_unsplit_step_tells_it(engines: Engines) -> None:
    with engines.start(2, share_cores(), TINY, AUTO, **UNKNOWN_CONNECTOR) as engine:
        prompts, arrive = [make_prompt(701, 3), *PROMPTS], (0, *MIXED)  # the first is prefilled in chunks
        unsplit = run_unsplit(engine, prompts, 6, arrive)
        told = engine.llm.collective_rpc("take_steps")
        assert count_nano(engine) == 0
        for check in ("0", "1"):
            before = count_nano(engine)
            engine.configure(DBO_MODE="always", DBO_CHECK=check)
            assert_close(unsplit, engine.generate(prompts, 6, arrive))
            assert count_nano(engine) > before
            for of_rank, expected in zip(engine.llm.collective_rpc("take_steps"), told, strict=True):
                for own, reference in zip(of_rank, expected, strict=True):
                    assert [(e.what, e.layer, e.tokens) for e in own] == [
                        (e.what, e.layer, e.tokens) for e in reference
                    ]
                    for event, other in zip(own, reference, strict=True):
                        assert event.is_whole == other.is_whole
                        assert event.saved == pytest.approx(other.saved, abs=1e-3)


@pytest.mark.slow
def test_chunks_of_tokens_are_dispatched_to_experts_beside_linear_attention(tmp_path: Path, engines: Engines) -> None:
    """Answers are close up to rounding: vLLM's kernels for CPU take bfloat16 only."""
    options = {"dtype": "bfloat16", "attention_backend": "CPU_ATTN", "enable_prefix_caching": False}
    model = make_family("Qwen3NextForCausalLM", tmp_path)
    with engines.start_ranks(2, model, AUTO, tensor_parallel_size=2, **options) as ranks:
        unsplit = ranks.run(generate, "off", None, 4, ARRIVALS, BATCHES)
        own = ranks.run(generate_in_nano_batches, 4, ARRIVALS, BATCHES, {"DBO_MODE": "always"})
    for (expected, _, _), (answers, nano, declined) in zip(unsplit, own, strict=True):
        assert nano > 0, declined
        assert_close_up_to_ties(expected, answers)
