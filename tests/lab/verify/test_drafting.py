"""Drafts of adapters of vLLM's own models are right as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_runtime.__main__ import main


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("GraniteForCausalLM", ["layer.residual_multiplier", "decoder.config.embedding_multiplier"]),
        ("Gemma2ForCausalLM", ["def record_first_layer", "def record_layer", "pre_feedforward_layernorm"]),
        ("Cohere2ForCausalLM", ['p.comm("add_reduce", collectives.all_reduce']),
    ],
)
def test_a_draft_verifies(
    architecture: str, parts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    assert main(["adapter", "new", architecture, "--output", str(folder)]) == 0
    assert "verifies: equal to the model's own forward" in capfd.readouterr().out
    (module,) = (file for file in folder.glob("*_adapter.py") if not file.name.startswith("test_"))
    source = module.read_text()
    assert not [part for part in parts if part not in source]
    assert "TODO" not in source
