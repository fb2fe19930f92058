"""Drafts of adapters, on toy decoders: what is written is a program that computes what the decoder does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dbo_runtime.__main__ import main
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.verify.draft.calls import Recording
from dbo_runtime.lab.verify.draft.folding import fold
from dbo_runtime.lab.verify.draft.package import DraftNames, write_package, write_source
from dbo_runtime.lab.verify.draft.recording import find_layers, record_forward
from dbo_runtime.lab.verify.tiny_config import make_config, shrink
from tests.support.lab.toy_decoders import (
    HIDDEN,
    AlternatingLayer,
    BatchedLayer,
    FusedLayer,
    Model,
    OutsideLayer,
    ParallelLayer,
    ScaledLayer,
    ShiftingDecoder,
    SkippingDecoder,
)

TOKENS = 23
COLLECTIVES: Any = SimpleNamespace(
    reduces=True,
    divide_attention=lambda attention, attend: None,
    without_reduce=lambda module: module,
    all_reduce=lambda x: x,
)


def make_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)), torch.arange(1.0, tokens + 1)


def record(model: nn.Module) -> Recording:
    with torch.no_grad():
        return record_forward(model, model.forward, "ToyForCausalLM", *make_inputs(TOKENS))


def draft(model: nn.Module) -> tuple[str, Program]:
    """Return the source of a model's adapter, and the program that it declares."""
    source, reason = write_source(record(model), "ToyAdapter")
    assert reason is None, reason
    names: dict[str, Any] = {"__name__": "draft"}
    exec(compile(source, "draft.py", "exec"), names)
    adapter = names["ToyAdapter"]()
    assert adapter.decline(model) is None
    program = record_program(adapter, model, COLLECTIVES)
    assert isinstance(program, Program)
    return source, program


@pytest.mark.parametrize("layer", [ScaledLayer, FusedLayer, ParallelLayer, AlternatingLayer, BatchedLayer])
def test_the_program_of_a_draft_computes_what_the_model_does(layer: type[nn.Module]) -> None:
    """Of another number of tokens than it was drafted with."""
    model = Model(layer)
    _, program = draft(model)
    x, positions = make_inputs(5)
    with torch.no_grad():
        expected = model(None, positions, None, inputs_embeds=x.clone())
        ((actual,),) = run_sequential((program,), [(x.clone(), positions)])
    torch.testing.assert_close(actual, expected)
    assert all(op.ordered == (op.name == "self_attn") for op in program.ops)


def test_layers_that_call_the_same_share_a_function_and_numbers_are_attributes() -> None:
    source, program = draft(Model(ScaledLayer))
    assert source.count("def record_layer") == 1
    assert "layer.residual_multiplier" in source
    assert "decoder.config.embedding_multiplier" in source
    assert "0.22" not in source
    assert [op.label for op in program.ops][:5] == [
        "mul",
        "L0.norm",
        "L0.self_attn",
        "L0.self_attn_reduce",
        "L0.mul_add",
    ]


def test_the_first_layer_may_differ_and_norms_overwrite_what_they_add() -> None:
    source, program = draft(Model(FusedLayer))
    assert "x, residual = self.record_first_layer(p, layer, collectives, positions, x)" in source
    assert "x, residual = self.record_layer(p, layer, collectives, positions, x, residual)" in source
    assert {len(op.overwrites) for op in program.ops if op.name == "second_norm"} == {2}


def test_a_layer_may_call_the_reduce_itself() -> None:
    """Also if it does so only where there are several ranks."""
    source, program = draft(Model(ParallelLayer))
    assert [op.lane for op in program.ops if op.layer == 1] == ["compute"] * 4 + ["comm", "compute"]
    assert "return module(x, y)[0]" in source
    assert "TODO" not in source


def test_kinds_of_layers_are_told_apart_by_an_attribute() -> None:
    source, _ = draft(Model(AlternatingLayer))
    assert "if index == 0:" not in source
    assert "if not layer.is_normed:" in source


def test_views_are_declared_and_copied_where_what_they_show_is_read_again() -> None:
    """A view has the memory of what it shows, which counts as overwritten."""
    source, program = draft(Model(BatchedLayer))
    assert "return value_1.clone(), value_2.clone(), " in source
    (op,) = (op for op in program.ops if op.label == "select")
    assert len(op.overwrites) == 1


def test_names_of_what_all_layers_read_differ_from_those_of_what_they_pass_on() -> None:
    """As in models that vLLM runs by transformers' code: positions are a view, too."""
    model = Model(ScaledLayer)
    model.model.__class__ = ShiftingDecoder
    source, program = draft(model)
    x, positions = make_inputs(5)
    with torch.no_grad():
        expected = model(None, positions, None, inputs_embeds=x.clone())
        ((actual,),) = run_sequential((program,), [(x.clone(), positions)])
    torch.testing.assert_close(actual, expected)
    assert "record_layer(p, layer, collectives, x_2, x)" in source


def test_unreduced_results_are_pointed_out() -> None:
    model = Model(ScaledLayer)
    for layer in model.model.layers:
        layer.mlp.down_proj.reduce_results = layer.self_attn.o_proj.reduce_results = False
    source, _ = draft(model)
    assert "# TODO: layer.self_attn, layer.mlp is not reduced" in source


def test_what_cannot_be_written_leaves_a_skeleton_that_declines() -> None:
    source, reason = write_source(record(Model(OutsideLayer)), "ToyAdapter")
    assert reason is not None
    assert "a tensor [8] from elsewhere" in reason
    assert reason in source
    assert "#   self_attn.o_proj: RowParallelLinear" in source
    assert "#   layer 0: layer.self_attn, ends in an all-reduce" in source
    compile(source, "draft.py", "exec")


def test_a_layer_that_reads_another_than_the_one_before_cannot_be_folded() -> None:
    model = Model(ScaledLayer)
    model.model.__class__ = SkippingDecoder
    with pytest.raises(ProgramError, match="layer 3 reads a result of a layer other than 2"):
        fold(record(model))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ProgramError, match="Linear has no list of layers"):
        find_layers(nn.Linear(1, 1))


def test_a_package_is_written_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "toy"
    assert write_package(folder, record(Model(ScaledLayer)), {"architectures": ["ToyForCausalLM"]}) is None
    files = {"config.json", "pyproject.toml", "test_toy_adapter.py", "toy_adapter.py"}
    assert {file.name for file in folder.iterdir()} == files
    assert 'ToyForCausalLM = "toy_adapter:ToyAdapter"' in (folder / "pyproject.toml").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        write_package(folder, record(Model(ScaledLayer)), {})


@pytest.mark.parametrize(
    ("architecture", "module"),
    [("GraniteForCausalLM", "granite"), ("GPTNeoXForCausalLM", "gpt_neox"), ("Qwen3MoeForCausalLM", "qwen3_moe")],
)
def test_packages_are_named_after_the_architecture(architecture: str, module: str) -> None:
    assert DraftNames.of(architecture).module == f"{module}_adapter"


def test_configs_are_made_tiny_with_factors_that_differ() -> None:
    large = {
        "hidden_size": 4096,
        "num_hidden_layers": 8,
        "layer_types": ["sliding", "full"] * 4,
        "residual_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "rope": {"head_dim": 128},
    }
    assert shrink(large) == {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["sliding", "full"] * 2,
        "residual_multiplier": 1.125,
        "embedding_multiplier": 1.25,
        "rope": {"head_dim": 32},
    }


def test_a_config_that_is_tiny_is_kept(tmp_path: Path) -> None:
    given = {"architectures": ["ToyForCausalLM"], "hidden_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert make_config(str(tmp_path)) == given


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"architectures": []}', '{"architectures": "a"}', '{"architectures": ["../a"]}']
)
def test_a_config_names_an_architecture(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="names no architecture"):
        make_config(str(tmp_path))


def test_a_model_has_a_config(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json; name the folder of a model or an architecture\.$"):
        make_config(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"there is no folder .*/modell; did you mean .*/model\?$"):
        make_config(str(tmp_path / "modell"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new"], "name the architecture"),
        (["somewhere", "GraniteForCausalLM"], "takes a second name"),
        (["somewhere", "--output", "here"], "takes a second name"),
    ],
)
def test_the_command_says_what_it_takes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapter", *words]) == 2
    assert message in capsys.readouterr().err
