"""Attention modules are divided at the call of attention, and compute the same. No engine needed."""
# ruff: noqa: RET504 - the form is what is tested

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from dbo_models.layers import call_attention
from dbo_runtime.vllm_plugin.api.attention import divide_attention, divide_forward

TOKENS, WIDTH = 5, 8


class Core(torch.nn.Module, AttentionLayerBase):
    """Attends causally: each token to the sum of those before it."""

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * (k * v).cumsum(0)


class Attention(torch.nn.Module):
    """The form of nearly all of vLLM's attention modules, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.o_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.attn = Core()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = self.qkv_proj(hidden_states).chunk(4, dim=-1)
        if positions is not None:
            q = q + positions[:, None]
        attended = self.attn(q, k, v)
        output = self.o_proj(attended * gate.sigmoid())
        return output


class Failing(Attention):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v, _ = self.qkv_proj(hidden_states).chunk(4, dim=-1)
        q = q @ q  # fails here
        attended = self.attn(q, k, v)
        return self.o_proj(attended)


class Twice(Attention):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        attended = self.attn(hidden_states, hidden_states, hidden_states)
        attended = self.attn(attended, attended, attended)
        return attended


class Residual(Attention):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        attended = self.attn(hidden_states, hidden_states, hidden_states)
        return attended + hidden_states


class Early(Attention):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        if positions is None:
            return hidden_states
        attended = self.attn(hidden_states, hidden_states, hidden_states)
        return attended


class Shaped(Attention):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        attended = self.attn(hidden_states, hidden_states, value=hidden_states)
        return attended


class Writing(Attention):
    def forward(self, positions: Any, output: Any, hidden_states: Any) -> Any:
        attended = self.attn(hidden_states, hidden_states, hidden_states)
        output[:] = attended


class OfTheStep(Attention):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        cos, _ = get_cos_and_sin_slice()  # type: ignore[name-defined] # noqa: F821 - as in vllm-ascend's MiniMax-M2
        attended = self.attn(hidden_states * cos, hidden_states, hidden_states)
        return attended


class Absent(Attention):
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        return self.o_proj(hidden_states)


class Linear(Core):
    """The form of vLLM's and vllm-ascend's linear attention: an operator writes to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Any, output: Any = None) -> Any:  # type: ignore[override]
        count = hidden_states.size(0)
        x, b, z = self.in_proj(hidden_states).chunk(3, dim=-1)
        core_out = torch.zeros_like(x)
        torch.ops.vllm.dbo_test_core(x, b.contiguous(), core_out, WIDTH)
        out = self.out_proj(core_out * z.sigmoid())
        if output is not None:
            output[:count] = out
        return out


class Dispatched(Linear):
    """As vLLM's class calls the forward of its platform."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_cpu

    def forward(self, hidden_states: Any) -> Any:  # type: ignore[override]
        return self._forward_method(hidden_states)

    def forward_cpu(self, hidden_states: Any) -> Any:
        x, b, z = self.in_proj(hidden_states).chunk(3, dim=-1)
        core_out = torch.zeros_like(x)
        torch.ops.vllm.dbo_test_core(x, b, core_out, WIDTH)
        return self.out_proj(core_out * z.sigmoid())


class WritingTwice(Linear):
    def forward(self, hidden_states: Any) -> Any:  # type: ignore[override]
        x, b, _ = self.in_proj(hidden_states).chunk(3, dim=-1)
        core_out = torch.zeros_like(x)
        torch.ops.vllm.dbo_test_core(x, b, core_out, WIDTH)
        return self.out_proj(core_out * b)  # b may have been written, too


def sum_up(x: torch.Tensor, b: torch.Tensor, out: torch.Tensor, size: int) -> None:
    assert size == WIDTH
    out.copy_((x * b).cumsum(0))


@pytest.fixture(scope="module", autouse=True)
def _operator() -> Iterator[None]:
    """Register the operator of `Linear` among vLLM's, for as long as these tests run."""
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("dbo_test_core(Tensor x, Tensor b, Tensor(a!) out, int size) -> ()")
    library.impl("dbo_test_core", sum_up, "CompositeExplicitAutograd")
    yield
    library._destroy()


def wrap(forward: Any) -> Any:
    @wraps(forward)
    def run(*args: Any) -> Any:
        return forward(*args)

    return run


class Decorated(Attention):
    @wrap
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        attended = self.attn(hidden_states, hidden_states, hidden_states)
        return attended


@pytest.mark.parametrize("positions", [torch.arange(TOKENS), None])
def test_parts_compute_what_the_module_computes(positions: torch.Tensor | None) -> None:
    module, x = Attention(), torch.randn(TOKENS, WIDTH)
    divided = divide_attention(module, call_attention)
    assert divided is not None
    assert (divided.taken, divided.kept) == (3, 1)
    *projected, gate = divided.project(positions, x)
    assert torch.equal(divided.project_out(divided.attend(*projected), gate), module(positions, x))


@pytest.mark.parametrize("kind", [Linear, Dispatched])
def test_parts_of_linear_attention_compute_what_the_module_computes(kind: type[Linear]) -> None:
    """The tensors that the operator reads and writes are joined from the parts of the tokens."""
    module, x = kind().double(), torch.randn(TOKENS, WIDTH).double()
    with torch.no_grad():
        divided = divide_attention(module, lambda attention, positions, x: attention(x))
        assert divided is not None
        assert (divided.taken, divided.kept) == (3, 1)
        parts = [divided.project(None, x[piece]) for piece in (slice(0, 2), slice(2, None))]
        *taken, _ = (torch.cat(each) for each in zip(*parts, strict=True))
        attended = divided.attend(*taken).split([2, 3])
        out = [divided.project_out(part, own[3]) for part, own in zip(attended, parts, strict=True)]
        torch.testing.assert_close(torch.cat(out), module(x))


def test_linear_attention_whose_operator_may_write_to_several_tensors_stays_one_op() -> None:
    assert divide_attention(WritingTwice(), lambda attention, positions, x: attention(x)) is None


def test_what_comes_before_and_after_attention_is_the_same_for_parts_of_the_tokens() -> None:
    module, x, positions = Attention().double(), torch.randn(TOKENS, WIDTH).double(), torch.arange(TOKENS)
    divided = divide_attention(module, call_attention)
    assert divided is not None
    parts = [divided.project(positions[piece], x[piece]) for piece in (slice(0, 2), slice(2, None))]
    q, k, v, _ = (torch.cat(each) for each in zip(*parts, strict=True))
    attended = divided.attend(q, k, v).split([2, 3])
    out = [divided.project_out(part, own[3]) for part, own in zip(attended, parts, strict=True)]
    torch.testing.assert_close(torch.cat(out), module(positions, x))


@pytest.mark.parametrize("form", [Twice, Residual, Early, Shaped, Writing, OfTheStep, Absent, Decorated])
def test_a_forward_of_another_form_stays_one_op(form: type[Attention]) -> None:
    assert divide_attention(form(), call_attention) is None


def test_a_module_that_someone_has_hooked_or_patched_stays_one_op() -> None:
    hooked, patched, other = Attention(), Attention(), Attention()
    hooked.register_forward_hook(lambda *_: None)
    vars(patched)["forward"] = lambda *_: None
    other.attn = torch.nn.Identity()  # no attention of vLLM's
    assert [divide_attention(module, call_attention) for module in (hooked, patched, other)] == [None] * 3


def test_a_file_that_has_changed_since_its_import_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(Failing).replace("class Failing(Attention)", "class Changing")
    file = tmp_path / "changing_attention.py"
    file.write_text(f"import torch\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    forward = importlib.import_module("changing_attention").Changing.forward
    assert divide_forward(forward) is not None
    divide_forward.cache_clear()
    file.write_text(f"import torch\n{source.replace('q @ q', 'q * 2')}")
    assert divide_forward(forward) is None


def test_an_error_names_the_line_of_the_modules_own_file() -> None:
    divided = divide_attention(Failing(), call_attention)
    assert divided is not None
    with pytest.raises(RuntimeError) as raised:
        divided.project(None, torch.randn(TOKENS, WIDTH))
    assert "q = q @ q  # fails here" in "".join(traceback.format_tb(raised.value.__traceback__))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("llama", "LlamaAttention"),
        ("qwen2", "Qwen2Attention"),
        ("qwen3", "Qwen3Attention"),
        ("qwen3_moe", "Qwen3MoeAttention"),
        ("mixtral", "MixtralAttention"),
        ("glm4", "Glm4Attention"),
        ("glm4_moe", "Glm4MoeAttention"),
        ("minimax_m2", "MiniMaxM2Attention"),
        ("gemma2", "Gemma2Attention"),
        ("gemma3", "Gemma3Attention"),
        ("commandr", "CohereAttention"),
    ],
)
def test_the_forwards_of_known_families_are_divided(module: str, name: str) -> None:
    forward = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name).forward
    halves = divide_forward(forward)
    assert halves is not None
    assert halves.taken == 3
