"""The adapter for DeepSeek: its contract, what it declines, and the program it records for the tiny model."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dbo_models.deepseek
from dbo_models.deepseek import DeepseekAdapter
from dbo_runtime.adapters.registry import GROUP, check_adapter, get_adapter
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.render import parse, render
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate
from tests.support.vllm.engine import Engine

GOLDEN = Path(__file__).with_name("golden") / "deepseek_2_alternate.txt"
LAYERS = 3
DENSE = [
    ("attn_norm", "compute"),
    ("attention", "compute"),
    ("attn_reduce", "comm"),
    ("mlp_norm", "compute"),
    ("mlp", "compute"),
    ("mlp_reduce", "comm"),
]
EXPERTS = [("moe" if name == "mlp" else name, lane) for name, lane in DENSE]


def test_it_keeps_the_contract_of_adapters() -> None:
    assert isinstance(check_adapter(DeepseekAdapter, "dbo_models.deepseek:DeepseekAdapter"), DeepseekAdapter)


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_it_is_found_by_the_name_of_the_architecture(architecture: str) -> None:
    assert architecture in {entry.name for entry in entry_points(group=GROUP)}
    assert isinstance(get_adapter(architecture), DeepseekAdapter)


def test_its_file_is_short() -> None:
    assert len(Path(dbo_models.deepseek.__file__).read_text(encoding="utf-8").splitlines()) < 100


def test_it_imports_neither_torch_nor_vllm() -> None:
    source = inspect.getsource(dbo_models.deepseek)
    assert "import torch" not in source
    assert "vllm import" not in source
    assert "import vllm" not in source


class DeepseekV2MLP(SimpleNamespace):
    """Goes by the name of vLLM's class."""


class OtherMLP(DeepseekV2MLP):
    """May do anything."""


def make_layer(
    dtype: str = "torch.bfloat16", latent: bool = True, kind: type = DeepseekV2MLP, **mlp: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        self_attn=SimpleNamespace(mla_attn=None) if latent else SimpleNamespace(),
        input_layernorm=SimpleNamespace(weight=SimpleNamespace(dtype=dtype)),
        mlp=kind(**mlp),
    )


def make_indexed_layer(buffer: Any) -> SimpleNamespace:
    """Return one whose attention is sparse; *buffer* is where its indexer leaves which keys it has chosen."""
    layer = make_layer()
    layer.self_attn.indexer = SimpleNamespace(topk_indices_buffer=buffer)
    return layer


def make_model(dtype: str = "torch.bfloat16", layers: Any = (), **config: Any) -> SimpleNamespace:
    """Return the part of vLLM's model that decides. Its *layers* are a dense one and one of experts if not given."""
    return SimpleNamespace(
        config=SimpleNamespace(**config),
        model=SimpleNamespace(layers=list(layers) or [make_layer(dtype), make_layer(dtype, experts=object())]),
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (make_model(layers=[make_layer(latent=False)]), "plain attention instead of MLA"),
        (make_model(layers=[make_indexed_layer("a buffer")]), "sparse attention (DeepSeek V3.2)"),
        (make_model(llama_4_scaling={"beta": 0.1}), "attention scaling by position"),
        (make_model("torch.float16"), "fp16 needs the decoder layer's own scaling; serve in bf16 or fp32"),
        (make_model(layers=[make_layer(), make_layer(kind=OtherMLP)]), "its MLP is not known (OtherMLP)"),
    ],
    ids=["plain attention", "sparse", "scaled", "fp16", "unknown MLP"],
)
def test_it_declines_what_it_cannot_decompose(model: SimpleNamespace, reason: str) -> None:
    assert reason in str(DeepseekAdapter().decline(model))


@pytest.mark.parametrize(
    "model",
    [
        make_model(),
        make_model("torch.float32"),
        make_model(llama_4_scaling=None),
        make_model(layers=[make_layer()]),
        make_model(layers=[make_indexed_layer(None)]),
    ],
    ids=["bf16", "fp32", "no scaling", "dense only", "sparse, without a shared buffer"],
)
def test_it_takes_other_models(model: SimpleNamespace) -> None:
    assert DeepseekAdapter().decline(model) is None


@pytest.fixture(scope="module")
def program(one_rank: Engine) -> Program:
    """Return the program that was recorded for the model that vLLM has loaded."""
    recorded: Program = one_rank.runner.get_model().forward.runtime.program
    return recorded


@pytest.fixture(scope="module")
def schedule(program: Program) -> Schedule:
    return lower((program,) * 2, alternate((program,) * 2))


def test_it_takes_the_model_that_is_served(one_rank: Engine) -> None:
    assert DeepseekAdapter().decline(one_rank.runner.get_model()) is None


def test_each_layer_is_norm_attention_reduce_norm_mlp_reduce(program: Program) -> None:
    """The first layer is dense. Experts have a name of their own: they cost something else."""
    layers = [DENSE, *[EXPERTS] * (LAYERS - 1)]
    expected = [(f"L{number}.{name}", lane) for number, layer in enumerate(layers) for name, lane in layer]
    assert [(op.label, op.lane) for op in program.ops] == [*expected, ("final_norm", "compute")]
    assert program.lanes == ("compute", "comm")


def test_only_attention_keeps_the_order_of_micro_batches(program: Program) -> None:
    assert {op.name for op in program.ops if op.ordered} == {"attention"}
    assert [op.label for op in program.ops if op.ordered] == [f"L{layer}.attention" for layer in range(LAYERS)]


def test_norms_and_reduces_overwrite_what_they_read_and_nothing_else_does(program: Program) -> None:
    for op in program.ops:
        expected = () if op.name in ("attention", "mlp", "moe") else op.reads
        assert op.overwrites == expected, op.label


def test_all_reduces_use_one_communicator(program: Program) -> None:
    assert {op.communicator for op in program.ops if op.lane == "comm"} == {"comm"}
    assert {op.communicator for op in program.ops if op.lane != "comm"} == {None}


def test_the_program_takes_tokens_and_positions_and_gives_hidden_states(program: Program) -> None:
    assert [value.name for value in program.inputs] == ["x", "positions"]
    assert program.outputs == program.ops[-1].writes
    assert all(program.inputs[1] in op.reads for op in program.ops if op.name == "attention")


def test_every_reduce_of_one_micro_batch_overlaps_computation_of_the_other(schedule: Schedule) -> None:
    """Between a reduce and the op that waits for it, the other micro-batch computes: that is what overlaps."""
    steps = schedule.instructions
    for number, step in enumerate(steps):
        if step.op.lane == "comm" and step.issue.micro_batch == 0:
            waiter = next(n for n, later in enumerate(steps) if step.issue in later.waits)
            between = steps[number + 1 : waiter]
            assert {"attention", "mlp", "moe"} & {s.op.name for s in between if s.issue.micro_batch == 1}, step.label


def test_the_schedule_of_two_micro_batches_is_the_one_on_file(schedule: Schedule) -> None:
    """A change that is meant: look at the difference, then replace the file's text by the new table."""
    assert render(schedule) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_the_schedule_on_file_is_read_back_safe(program: Program) -> None:
    validate(parse(GOLDEN.read_text(encoding="utf-8"), [program] * 2))
