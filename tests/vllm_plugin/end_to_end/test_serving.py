"""`vllm serve`, as a user starts it: with overlap it answers as without, and what cannot be split is served unsplit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_pictures import held_out as held_out_pictures
from examples.tiny_tasks import held_out
from tests.support.observe.trace_folders import check_traces
from tests.support.vllm.engines import TINY, find_transport, share_cores
from tests.support.vllm.families import make_family
from tests.support.vllm.server import serve
from tests.support.vllm.vision_families import TINY as TINY_VISION

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TASKS = held_out(10)
PROMPTS = [task.prompt for task in TASKS]
ANSWERS = [task.answer for task in TASKS]
RIGHT = 24  # of 24 questions about pictures
ON = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always"}


def test_two_ranks_served_with_overlap_answer_as_without(tmp_path: Path) -> None:
    cores = {"VLLM_CPU_OMP_THREADS_BIND": share_cores()}
    traces = {"DBO_TRACE": str(tmp_path / "traces"), "DBO_TRACE_STEPS": "3"}
    with serve(TINY, tmp_path / "log", "--tensor-parallel-size=2", **ON, **cores, **traces) as server:
        assert server.complete(PROMPTS) == ANSWERS
        steps, predicted = server.scrape("vllm:dbo_steps_total"), server.scrape("vllm:dbo_predicted_seconds_total")
        log = server.log.read_text()
    assert [count > 0 for labels, count in steps.items() if 'mode="split"' in labels] == [True]
    assert all('engine="0"' in labels and f'model_name="{TINY}"' in labels for labels in steps)
    assert not predicted  # nothing is, without costs
    check_traces(tmp_path / "traces", ranks=2, steps=3)
    assert log.count("traces are written") == 1
    assert log.count("dual-batch overlap is active") == 1
    assert "adapter=dbo_models.deepseek.DeepseekAdapter" in log
    assert f"transport={find_transport()}" in log
    assert log.count("new plan") == 1


def test_data_and_expert_parallel_served_with_overlap_answer_as_without(tmp_path: Path) -> None:
    """With several API servers, too, whose metrics vLLM keeps in another way."""
    options = ("--data-parallel-size=2", "--enable-expert-parallel", "--api-server-count=2")
    settings = {**ON, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "DBO_TRACE": str(tmp_path / "traces")}
    with serve(TINY, tmp_path / "log", *options, **settings) as server:
        assert server.complete(PROMPTS) == ANSWERS
        steps = server.scrape("vllm:dbo_steps_total")
        log = server.log.read_text()
    split = {labels: count for labels, count in steps.items() if 'mode="split"' in labels}
    assert sorted(labels.partition('engine="')[2][0] for labels in split) == ["0", "1"]
    assert len(set(split.values())) == 1  # all split a step, or none
    assert min(split.values()) > 0
    check_traces(tmp_path / "traces", ranks=2)
    assert log.count("dual-batch overlap is active") == 1
    assert "ranks=2  data_parallel=2  transport=one host" in log
    assert log.count("new plan") == 1


def test_embeddings_and_ranks_of_documents_are_those_of_a_server_without_overlap(tmp_path: Path) -> None:
    """As in docs/pooling.md, in float32."""
    texts = [*PROMPTS[:5], "copy:abc=abc"]
    options = ("--tensor-parallel-size=2", "--runner=pooling")
    cores = {"VLLM_CPU_OMP_THREADS_BIND": share_cores()}
    found = []
    for number, settings in enumerate(({}, ON)):
        with serve(TINY, tmp_path / f"log{number}", *options, **cores, **settings) as server:
            found.append((server.embed(texts), server.rerank(texts[0], texts[1:])))
            steps = server.scrape("vllm:dbo_steps_total") if settings else {}
    (vectors, ranks), (split_vectors, split_ranks) = found
    for vector, split in zip(vectors, split_vectors, strict=True):
        assert split == pytest.approx(vector, abs=1e-5)
    assert [*split_ranks] == [*ranks]
    assert split_ranks == pytest.approx(ranks, abs=1e-5)
    assert [count > 1 for labels, count in steps.items() if 'mode="split"' in labels] == [True]


def test_pictures_are_seen_with_overlap_as_without(tmp_path: Path) -> None:
    questions = held_out_pictures(24)
    options = (
        "--tensor-parallel-size=2",
        '--limit-mm-per-prompt={"image": 3, "video": 0}',
        "--mm-processor-cache-gb=0",
    )
    cores = {"VLLM_CPU_OMP_THREADS_BIND": share_cores()}
    answers = []
    for name, settings in (("off", {"VLLM_ASCEND_ENABLE_DBO": "0"}), ("on", ON)):
        with serve(TINY_VISION, tmp_path / name, *options, **settings, **cores) as server:
            answers.append(server.chat(questions))
            forwards, log = server.scrape("vllm:dbo_encoder_forwards_total"), server.log.read_text()
    assert answers[0] == answers[1]
    assert sum(answer == question.answer for answer, question in zip(answers[1], questions, strict=True)) >= RIGHT
    assert next(count for labels, count in forwards.items() if 'mode="split"' in labels) > 0
    assert log.count("the vision encoder overlaps as well") == 1
    assert "encoder=Qwen2_5_VisionTransformer  adapter=dbo_models.qwen_vl.Qwen25VisionAdapter" in log


def test_vllm_plugins_without_us_serves_as_if_we_were_not_installed(tmp_path: Path) -> None:
    settings = {**ON, "VLLM_PLUGINS": "lora_filesystem_resolver", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with serve(TINY, tmp_path / "log", **settings) as server:
        assert server.complete(PROMPTS) == ANSWERS
        assert "[dbo_runtime]" not in server.log.read_text()


def test_a_model_without_an_adapter_is_served_unsplit_and_the_log_says_so(tmp_path: Path) -> None:
    model = make_family("GraniteForCausalLM", tmp_path / "granite")
    script = (
        "from vllm import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, dtype='float32', enforce_eager=True, max_model_len=256,"
        f" kv_cache_memory_bytes={1 << 26}, skip_tokenizer_init=True)\n"
        "sampling = SamplingParams(max_tokens=2, detokenize=False)\n"
        "answers = llm.generate([{'prompt_token_ids': [1, 2, 3, 4]}] * 4, sampling, use_tqdm=False)\n"
        "assert len(answers) == 4 and all(len(a.outputs[0].token_ids) == 2 for a in answers)\n"
        "import dbo_runtime\n"
        "print(dbo_runtime.statistics()['standing_declines'])\n"
    )
    done = run_python(script, VLLM_ENABLE_V1_MULTIPROCESSING="0", **ON)
    assert done.returncode == 0, done.stderr[-4000:]
    reason = "no adapter is registered  detail=GraniteForCausalLM; `dbo adapter new GraniteForCausalLM`"
    assert f"every step runs unsplit  reason={reason}" in done.stderr
    assert done.stdout.splitlines()[-1] == "{'no adapter is registered': 1}"


def test_where_there_is_nothing_to_hide_vllms_own_forward_serves_and_metrics_say_why(tmp_path: Path) -> None:
    """Neither is there a file of costs: that is one line in the log, and a gauge."""
    settings = {"DBO_MODE": "auto", "DBO_COSTS": str(tmp_path / "none.json"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with serve(TINY, tmp_path / "log", **{**ON, **settings}) as server:
        assert server.complete(PROMPTS) == ANSWERS
        standing, costs = server.scrape("vllm:dbo_standing_declines_total"), server.scrape("vllm:dbo_costs_known")
        steps, log = server.scrape("vllm:dbo_steps_total"), server.log.read_text()
    ((labels, count),) = standing.items()
    assert 'reason="no communication to hide"' in labels
    assert count == 1
    ((labels, known),) = costs.items()
    assert 'asked="yes"' in labels
    assert known == 0
    assert set(steps.values()) == {0}
    assert log.count("every step runs unsplit") == 1
    assert "overlap is active" not in log
    assert log.count("no costs to plan with") == 1


def test_a_setting_that_is_not_allowed_stops_the_start(tmp_path: Path) -> None:
    script = f"from vllm import LLM\nLLM({str(TINY)!r})\n"
    done = run_python(script, VLLM_ASCEND_ENABLE_DBO="1", DBO_MODE="sometimes")
    assert done.returncode != 0
    assert "ConfigError: DBO_MODE='sometimes' is not allowed; it takes auto, always or off" in done.stderr


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
    return subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300)
