"""Out of a long log of vLLM's comes one line: its own message and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_runtime.lab.start.start_failure import describe_failure

CORE = "(EngineCore pid=10975) ERROR 11-27 04:32:44 [core.py:1366] "
GENERIC = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
NUMA = f"""\
INFO 11-27 04:32:22 [model.py:692] Resolved architecture: DeepseekV3ForCausalLM
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "/vllm/v1/engine/core.py", line 1328, in run_engine_core
{CORE}AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers. Allowed NUMA nodes are [0].
(EngineCore pid=10975) Process EngineCore:
(EngineCore pid=10975)     raise e
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
MEMORY = f"""\
(Worker_TP0 pid=7) ERROR 11-27 04:32:44 [multiproc_executor.py:9] ValueError: Available memory on node 0 (3/24 GiB) on \
startup is less than desired CPU memory utilization (0.92, 22 GiB). Decrease it.
{CORE}Exception: WorkerProc initialization failed due to an exception in a background process.
"""
INVALID = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Invalid repository ID or local directory specified: 'tiny' [type=value_error, input_value=X]
    For further information visit https://errors.pydantic.dev/2/v/value_error
"""
LENGTH = (
    "(APIServer pid=9) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
    "  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len (4096). "
    f"To allow overriding this maximum, set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. {'Be very careful with it, ' * 20}"
    "[type=value_error, input_value=X]\n"
)


def test_the_root_cause_is_found_behind_what_only_points_at_it(tmp_path: Path) -> None:
    said = describe_failure(str(tmp_path), NUMA, GENERIC)
    assert said.startswith("vLLM fails: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers. Allowed")
    assert said.endswith(
        'Set VLLM_CPU_OMP_THREADS_BIND to the cores of each rank, such as "0|1" for two ranks, or to nobind.'
    )
    assert "\n" not in said


def test_a_lack_of_memory_has_a_remedy(tmp_path: Path) -> None:
    said = describe_failure(str(tmp_path), MEMORY, GENERIC)
    assert "is less than desired CPU memory utilization" in said
    assert "--kv-cache-memory-bytes 134217728" in said


def test_of_a_validation_what_is_wrong_is_shown(tmp_path: Path) -> None:
    said = describe_failure(str(tmp_path), INVALID, GENERIC)
    assert said == "vLLM fails: Invalid repository ID or local directory specified: 'tiny'."


def test_ranks_that_do_not_divide_the_heads_have_a_remedy(tmp_path: Path) -> None:
    heads = "Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    said = describe_failure(str(tmp_path), "", ValueError(heads))
    assert said == f"vLLM fails: {heads} Choose a --tensor-parallel-size that divides the number of heads."


def test_a_long_message_ends_after_a_sentence_and_before_the_remedy(tmp_path: Path) -> None:
    assert describe_failure(str(tmp_path), LENGTH, GENERIC) == (
        "vLLM fails: User-specified max_model_len (100000) is greater than the derived max_model_len (4096). "
        "To allow overriding this maximum, set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. "
        "Lower --max-model-len to the model's own maximum, or leave it out."
    )


def test_a_long_sentence_is_cut_and_says_so(tmp_path: Path) -> None:
    said = describe_failure(str(tmp_path), "", ValueError("word " * 200))
    assert said.endswith("word ...")
    assert len(said) < 450


@pytest.mark.parametrize(
    ("name", "hint"), [("tiny-deepsek", "; did you mean FOLDER/tiny-deepseek?"), ("x", ". Name the folder of a model.")]
)
def test_a_folder_that_is_not_there_has_a_neighbour(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "tiny-deepseek").mkdir()
    model = str(tmp_path / name)
    said = describe_failure(model, "", OSError(f"Repo id must be in the form 'repo_name': {model!r}."))
    assert said.endswith(f"There is no folder {model}{hint.replace('FOLDER', str(tmp_path))}")


def test_an_end_without_a_message_is_told_as_it_is(tmp_path: Path) -> None:
    said = describe_failure(str(tmp_path), "INFO started", TimeoutError("vLLM has not answered within 900 s.\nIts log"))
    assert said == "vLLM fails: vLLM has not answered within 900 s."
