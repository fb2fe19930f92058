"""What adapters are tried by: right ones pass, and of wrong ones the first wrong op is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbo_models.dense import DenseAdapter
from dbo_runtime.adapters.communication import Collectives
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.verify.comparing_forward import Mismatch, Verification
from dbo_runtime.lab.verify.results import join_pieces
from dbo_runtime.lab.verify.verification import verify_adapter
from dbo_runtime.vllm_plugin.api import attention
from dbo_runtime.vllm_plugin.api.attention import Halves, divide_forward
from dbo_runtime.vllm_plugin.install import worker_hooks as hooks
from tests.support.vllm import spoiled_ops
from tests.support.vllm.engines import TINY
from tests.support.vllm.families import make_family
from tests.support.vllm.spoiled_ops import spoil_op
from tests.support.vllm.vision_families import QWEN3, make_vision_family


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_family("LlamaForCausalLM", tmp_path_factory.mktemp("llama")))


class Wrapped(DenseAdapter):
    """Replaces the function of one op."""

    def __init__(self, label: str, function: Any) -> None:
        self.label, self.function = label, function

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        spoil_op(p, self.label, self.function)
        return super().record(p, model, collectives, x, positions)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_registered_adapter_passes(llama: str) -> None:
    verification = verify_adapter(llama)
    assert not verification.mismatches, str(verification)
    assert verification.cuts > 12
    count = f"{len(verification.program.ops)} ops, unsplit, in two stages and cut at {verification.cuts} places"
    assert str(verification) == f"equal to the model's own forward: {count}"


@pytest.mark.vllm
@pytest.mark.slow
def test_decomposed_latent_attention_passes_at_every_cut() -> None:
    verification = verify_adapter(str(TINY), has_side=True, attention_backend="CPU_MLA")
    assert not verification.mismatches, str(verification)
    assert {op.name for op in verification.program.ops if op.lane == "side"} == {"keys"}
    assert verification.in_stages


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_keeps_inputs_by_token_is_tried_with_them(tmp_path: Path) -> None:
    model = make_vision_family(QWEN3, tmp_path / "model")
    verification = verify_adapter(str(model), skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1, "video": 0})
    assert not verification.mismatches, str(verification)
    assert "take_features" in {op.name for op in verification.program.ops}


@pytest.mark.vllm
@pytest.mark.slow
def test_an_op_that_computes_something_else_is_named(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that has run an engine with overlap: a split forward would not be the model's own."""
    hooks.install()
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_DBO", "1")
    monkeypatch.setenv("DBO_MODE", "always")
    verification = verify_adapter(llama, Wrapped("L1.mlp", lambda fn: lambda x: fn(x) * 1.01))
    assert {mismatch.op for mismatch in verification.mismatches if mismatch.cut is None} == {"L1.mlp"}, str(
        verification
    )
    assert verification.mismatches[0].declared_at.startswith(str(spoiled_ops.__file__))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "spoil", "named"),
    [
        # Keys that depend on the token before, and a result that depends on how many tokens there are.
        ("before", lambda q, k, v: (q, k + k.roll(1, 0), v), "attention"),
        ("after", lambda out: out + out.shape[0], "attention"),
    ],
)
def test_a_division_of_attention_that_is_not_token_wise_is_named(
    half: str, spoil: Any, named: str, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches do not run it: nano-batches are compared at every cut, too."""

    def divide(forward: Any) -> Halves | None:
        halves = divide_forward(forward)
        assert halves is not None
        function = getattr(halves, half)

        def run(*args: Any) -> Any:
            found = function(*args)
            return spoil(*found) if isinstance(found, tuple) else spoil(found)

        return halves._replace(**{half: run})

    monkeypatch.setattr(attention, "divide_forward", divide)
    verification = verify_adapter(llama)
    assert {mismatch.op.partition(".")[2] for mismatch in verification.mismatches} == {named}, str(verification)
    assert all("in nano-batches" in mismatch.step for mismatch in verification.mismatches)


@pytest.mark.vllm
@pytest.mark.slow
def test_an_op_that_depends_on_the_cut_is_named_with_the_cut(llama: str) -> None:
    """It adds how many tokens there are, and those of a micro-batch are fewer than the step's."""
    verification = verify_adapter(llama, Wrapped("L2.attn_reduce", lambda fn: lambda x: fn(x) + x.shape[0]))
    assert {mismatch.op for mismatch in verification.mismatches if mismatch.cut is not None} == {"L2.attn_reduce"}, str(
        verification
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_what_is_declined_is_not_tried(llama: str) -> None:
    class Declining(DenseAdapter):
        def decline(self, model: Any) -> Decline | None:
            return Decline("on a whim")

    with pytest.raises(DeclineError, match="LlamaForCausalLM is declined: on a whim"):
        verify_adapter(llama, Declining())


@pytest.mark.vllm
@pytest.mark.slow
def test_without_an_adapter_there_is_nothing_to_try(tmp_path: Path) -> None:
    with pytest.raises(
        DeclineError,
        match=r"no adapter is registered \(GraniteForCausalLM; `dbo adapter new",
    ):
        verify_adapter(str(make_family("GraniteForCausalLM", tmp_path)))


@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3)])
def test_results_of_micro_batches_are_joined_along_the_tokens(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    pieces = whole.split([2, 3], dim=whole.dim() - 2)
    assert torch.equal(join_pieces(pieces, whole), whole)
    assert join_pieces([torch.ones(2)], whole).shape == (2,)  # of other dimensions: differs, as it is


def test_mismatches_read_as_lines() -> None:
    mismatch = Mismatch("L1.mlp", "adapter.py:7", 5, "prefill of 21 tokens", 0.25)
    line = "prefill of 21 tokens, cut at token 5: L1.mlp differs first, by 2.5e-01 of the largest value (adapter.py:7)"
    assert (
        str(Verification(None, 1, mismatches=[mismatch, mismatch._replace(cut=None)]))
        == f"{line}\n{line.replace('cut at token 5', 'unsplit')}"
    )  # type: ignore[arg-type]
