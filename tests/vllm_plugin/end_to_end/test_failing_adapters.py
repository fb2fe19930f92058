"""An adapter that does not fit this version of vLLM: its model is served unsplit, and says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dbo_models import dense, layers
from dbo_runtime.vllm_plugin.api.versions import get_version
from dbo_runtime.vllm_plugin.step.failures import FAILED, FAILED_STEP
from tests.support.vllm.engine import make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.failing import MESSAGE, VARIABLE, fail
from tests.support.vllm.families import make_family

PROMPTS = [make_prompt(30, 1), make_prompt(40, 2)]
OPTIONS = {"attention_backend": "CPU_ATTN", "enable_prefix_caching": False}
VERSION = re.escape(f"; vLLM {get_version()}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("owner", "name", "detail"),
    [
        (dense, "check_parts", r"dbo_models.dense.DenseAdapter: AttributeError: {0}, at dbo_models/dense.py:\d+"),
        (layers, "record_add_norm", r"dbo_models.dense.DenseAdapter: AttributeError: {0}, at dbo_models/layers.py:\d+"),
        (
            layers,
            "_final_norm",
            r"AttributeError: {0}; while running op 'final_norm', outside any layer, micro-batch 0, lane 'compute', .*",
        ),
    ],
    ids=["declining", "recording", "running"],
)
def test_the_model_is_served_unsplit_for_the_error_of_its_adapter(
    owner: object,
    name: str,
    detail: str,
    model: Path,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(owner, name, fail)
    engine = engines.get(1, "nobind", model, {"CASE": name}, **OPTIONS)
    assert len(engine.generate(PROMPTS)) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "every step runs unsplit" in line]
    reason = FAILED_STEP if name == "_final_norm" else FAILED
    assert re.search(f"reason={reason}  detail={detail.format(re.escape(MESSAGE))}{VERSION}", line), line


@pytest.mark.slow
def test_ranks_whose_op_fails_decline_together(model: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**OPTIONS, "worker_extension_cls": "tests.support.vllm.failing.Extension"}
    with engines.start(2, share_cores(), model, {VARIABLE: "op"}, **options) as engine:
        assert len(engine.generate(PROMPTS)) == 2
        declined = [found["declined"].get(FAILED_STEP) for found in engine.statistics()]
        assert declined == [1, 1]
        engine.configure()  # no setting changes that
        engine.generate(PROMPTS)
        assert engine.count_split() == 0
