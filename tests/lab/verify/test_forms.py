"""Adapters made of the parts of `dbo_models.forms`, and the parts on plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_models.forms import BlockRecorder, record_add, record_scale
from dbo_runtime.adapters.contract import StageAdapter
from dbo_runtime.adapters.registry import get_backbone_adapter
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.verify.verification import verify_adapter
from tests.support.vllm.families import FAMILIES, SIZES
from tests.support.vllm.family_checks import OURS


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("architecture", OURS)
def test_every_architecture_passes_with_its_adapter(architecture: str, tmp_path: Path) -> None:
    """Windows are of 64 tokens, longer than these prompts: test_families.py has the longer ones."""
    from transformers import AutoConfig

    model_type, extra = FAMILIES[architecture]
    AutoConfig.for_model(model_type, **{**SIZES, **extra}, architectures=[architecture]).save_pretrained(tmp_path)
    adapter = get_backbone_adapter(architecture)
    verification = verify_adapter(str(tmp_path))
    assert not verification.mismatches, str(verification)
    assert verification.in_stages is (isinstance(adapter, StageAdapter) and adapter.takes_stages)
    assert verification.cuts > 10


@pytest.mark.vllm
@pytest.mark.slow
def test_gemma_4_passes_without_experts(tmp_path: Path) -> None:
    from transformers import AutoConfig

    model_type, extra = FAMILIES["Gemma4ForCausalLM"]
    sizes = {**SIZES, **extra, "enable_moe_block": False}
    AutoConfig.for_model(model_type, **sizes, architectures=["Gemma4ForCausalLM"]).save_pretrained(tmp_path)
    verification = verify_adapter(str(tmp_path))
    assert not verification.mismatches, str(verification)


class Attention:
    """Adds the position."""

    def __call__(self, positions: Any, x: Any) -> Any:
        return x + positions


def run(record: Callable[[BlockRecorder, Value], Value], reduces: bool = True) -> tuple[Any, list[str]]:
    """Return what a program of x = 3 and positions = 7 computes, and the names of its ops."""
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions")
    with p.layer(0):
        result = record(BlockRecorder(p, make_collectives(reduces), positions), x)
    program = p.build(result)
    ((value,),) = run_sequential((program,), [(3, 7)])
    return value, [f"{op.lane}:{op.name}" for op in program.ops]


def make_collectives(reduces: bool = True) -> Any:
    """Return collectives that take no reduce away, and whose reduce multiplies by 10."""
    return SimpleNamespace(
        reduces=reduces,
        divide_attention=lambda attention, attend: None,
        without_reduce=lambda module: module,
        all_reduce=lambda x: x * 10,
    )


def test_a_block_is_the_module_and_its_reduce() -> None:
    value, ops = run(lambda blocks, x: blocks.record_block("mlp", lambda x: x + 1, x))
    assert (value, ops) == (40, ["compute:mlp", "comm:mlp_reduce"])


def test_attention_is_ordered() -> None:
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions")
    with p.layer(0):
        result = BlockRecorder(p, make_collectives(), positions).record_attention(Attention(), x)
    assert [op.ordered for op in p.build(result).ops] == [True, False]


def test_parallel_blocks_share_one_reduce() -> None:
    def record(blocks: BlockRecorder, x: Value) -> Value:
        return blocks.record_parallel(Attention(), lambda x: x * 2, x)

    value, ops = run(record)
    assert value == ((3 + 7) + 3 * 2) * 10
    assert ops == ["compute:attention", "compute:mlp", "compute:parallel_add", "comm:parallel_reduce"]


def test_the_mlp_of_parallel_blocks_may_have_a_norm_of_its_own() -> None:
    def record(blocks: BlockRecorder, x: Value) -> Value:
        other = record_scale(blocks.p, "mlp_norm", x, 100)
        return blocks.record_parallel(Attention(), lambda x: x * 2, x, other)

    assert run(record)[0] == ((3 + 7) + 300 * 2) * 10


def test_a_residual_is_added_with_its_scale() -> None:
    assert run(lambda blocks, x: record_add(blocks.p, "add", x, blocks.positions))[0] == 10
    assert run(lambda blocks, x: record_add(blocks.p, "add", x, blocks.positions, 0.5))[0] == 6.5


def test_results_that_need_no_reduce_get_none() -> None:
    assert run(lambda blocks, x: blocks.record_block("mlp", lambda x: x, x), reduces=False)[1] == ["compute:mlp"]
