"""Ops of split steps that are compiled one by one give what they give eager, whatever they are given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM, which compiles")

from vllm.config import CompilationMode
from vllm.forward_context import set_forward_context

from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.alternatives import compilation
from dbo_runtime.vllm_plugin.alternatives.compilation import (
    COMPILED_OPS,
    CompiledFunction,
    OpCompiler,
    check_compilation,
)
from tests.support.programs import record_toy
from tests.support.vllm.engine import Engine, find_difference, make_prompt
from tests.support.vllm.engines import TINY, Engines, share_cores
from tests.support.vllm.families import find_backend, make_family
from tests.support.vllm.thread_ranks import ThreadGroup, ThreadRanks
from tests.support.vllm.vision_families import QWEN3, make_requests, make_vision_family

SETTINGS = {"DBO_COMPILE": "1"}
CHECKED = {"DBO_MODE": "always", "DBO_CHECK": "1"}
SIZES = (1, 2, 3, 17, 64, 500)


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek", "qwen")])
def compiling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Engine:
    """Return an engine that compiles what it serves, and ops of split steps: the one with experts first."""
    if request.param == "deepseek":
        return engines.get(1, "nobind", settings=SETTINGS, enforce_eager=False)
    name = "Qwen3ForCausalLM"
    model = make_family(name, tmp_path_factory.mktemp("model"))
    options = {"enforce_eager": False, "attention_backend": find_backend(name)}
    return engines.get(1, "nobind", model, settings=SETTINGS, **options)


def find_functions(engine: Engine) -> dict[str, CompiledFunction]:
    ops = engine.runner.get_model().forward.runtime.program.ops
    return {op.label: op.fn for op in ops if isinstance(op.fn, CompiledFunction)}


def test_everything_that_may_be_is_compiled(compiling: Engine) -> None:
    ops = compiling.runner.get_model().forward.runtime.program.ops
    functions = find_functions(compiling)
    assert set(functions) == {op.label for op in ops if op.name in COMPILED_OPS}
    assert [label for label, function in functions.items() if not function.is_compiled] == []


@pytest.mark.parametrize("tokens", SIZES)
@torch.inference_mode()
def test_an_op_gives_what_it_gives_eager(compiling: Engine, tokens: int) -> None:
    hidden = compiling.runner.vllm_config.model_config.get_hidden_size()
    for label, function in find_functions(compiling).items():
        x, residual = torch.randn(2, tokens, hidden)
        if label.endswith("attention"):
            continue  # means nothing without requests; steps are compared below
        given = (x,) if label.endswith("mlp") or label == "L0.attn_norm" else (x, residual)
        assert function.fits(given) is (tokens > 1)
        with set_forward_context(None, compiling.runner.vllm_config, num_tokens=tokens, skip_compiled=True):
            found, wanted = (fn(*(each.clone() for each in given)) for fn in (function, function.fn))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_does_not_fit_runs_eager(compiling: Engine) -> None:
    hidden = compiling.runner.vllm_config.model_config.get_hidden_size()
    norm = find_functions(compiling)["L1.attn_norm"]
    x = torch.randn(8, hidden)
    most = compiling.runner.vllm_config.scheduler_config.max_num_batched_tokens
    others = [
        torch.randn(hidden, 8).T,
        torch.randn(most + 1, hidden),
        x.double(),
        torch.randn(8, hidden + 1),
        torch.randn(1, 8, hidden),
    ]
    assert norm.fits((x, x))
    assert [other.shape for other in others if norm.fits((other, other))] == []
    assert not norm.fits((x, x[:4]))


def test_split_steps_equal_unsplit_ones(compiling: Engine) -> None:
    prompts, split = [make_prompt(length, length) for length in (33, 2, 64, 401, 7)], compiling.count_split()
    arrive = (0, 0, 1, 2, 2)
    compiling.configure(**CHECKED)  # each split step is compared with the compiled unsplit one
    ours = compiling.generate(prompts, tokens=4, arrive=arrive)
    assert compiling.count_split() > split
    compiling.configure(DBO_MODE="off")
    assert find_difference(ours, compiling.generate(prompts, tokens=4, arrive=arrive)) < 1e-4


def test_answers_are_those_of_eager_ops(compiling: Engine) -> None:
    prompts = [make_prompt(length, length) for length in (3, 1, 17, 130)]
    compiling.configure(**CHECKED)
    ours = compiling.generate(prompts, tokens=3)
    kept = {function: function._compiled for function in find_functions(compiling).values()}
    try:
        for function in kept:
            function.drop()
        assert find_difference(ours, compiling.generate(prompts, tokens=3)) < 1e-4
    finally:
        for function, compiled in kept.items():
            function._compiled = compiled


@pytest.mark.slow
def test_reduces_are_left_out_of_what_is_compiled(engines: Engines) -> None:
    with engines.start(2, share_cores(), TINY, SETTINGS, enforce_eager=False) as engine:
        engine.configure(**CHECKED)
        prompts = [make_prompt(length, length) for length in (33, 2, 64)]
        ours = engine.generate(prompts, tokens=3)  # compared, each step
        assert engine.count_split() > 0
        assert all(engine.llm.collective_rpc(_all_compiled)), "some are not compiled"
        engine.configure(DBO_MODE="off")
        assert find_difference(ours, engine.generate(prompts, tokens=3)) < 1e-3


def _all_compiled(worker: Any) -> bool:
    ops = worker.model_runner.get_model().forward.runtime.program.ops
    return all(op.fn.is_compiled for op in ops if hasattr(op.fn, "is_compiled"))


def make_config(**changes: Any) -> Any:
    settings = {"mode": CompilationMode.DYNAMO_TRACE_ONCE, "backend": "inductor", "ranks": 1, **changes}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=settings["mode"], backend=settings["backend"]),
        parallel_config=SimpleNamespace(data_parallel_size=settings["ranks"]),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mode": CompilationMode.NONE}, "enforce_eager"),
        ({"backend": "eager"}, "enforce_eager"),
        ({"ranks": 2}, "data parallel"),
    ],
)
def test_only_what_vllm_compiles_is_compiled(changes: dict[str, Any], reason: str | None) -> None:
    found = check_compilation(make_config(**changes), record_toy())
    assert found is None if reason is None else reason in str(found)


def test_concurrent_ops_are_not_compiled() -> None:
    p = ProgramBuilder(has_side=True)
    x = p.input("x")
    program = p.build(p.side("attn_norm", lambda x: x, x))
    assert "concurrent ops" in str(check_compilation(make_config(), program))
    assert check_compilation(make_config(), program.fold_side()) is None


class Log:
    """Keep log lines."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def warning(self, what: str, **more: Any) -> None:
        self.said.append({"what": what, **more})

    info = warning


def branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x  # depends on data: no graph


@pytest.mark.parametrize("fn", [branch, partial(torch.add, other=1)], ids=["cannot be traced", "can be"])
def test_an_op_that_cannot_be_compiled_stays_eager_and_says_so_once(compiling: Engine, fn: Any) -> None:
    p, log = ProgramBuilder(), Log()
    x, _ = p.input("x"), p.input("positions")
    for layer in range(2):
        with p.layer(layer):
            x = p.compute("mlp", fn, x)
    program = p.build(x)
    collectives = SimpleNamespace(get_reducing_module=lambda fn: None)
    compiler = OpCompiler(compiling.runner.vllm_config, collectives, log, ThreadGroup(0, 1))
    wrapped = compiler.wrap(program)
    done = compiler.compile(wrapped)
    assert done == (0 if fn is branch else 2)
    assert [line["ops"] for line in log.said] == ([0, 2] if fn is branch else [2])
    assert replace(program, ops=()) == replace(wrapped, ops=())
    hidden = compiling.runner.vllm_config.model_config.get_hidden_size()
    for size in (hidden, hidden + 1):  # the second one does not fit
        x = -torch.ones(4, size)
        assert torch.equal(wrapped.ops[0].fn(x), fn(x))


HIDDEN = 8
EAGER = "ops of split steps run eager, though DBO_COMPILE=1"


def make_small_config() -> Any:
    model = SimpleNamespace(
        get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: 3, dtype=torch.float32, uses_mrope=False
    )
    own = make_config()
    own.model_config, own.scheduler_config = model, SimpleNamespace(max_num_batched_tokens=512)
    return own


def record_small(features: Callable[..., Any], reduce: Callable[..., Any]) -> Program:
    """Return a program whose first op is never compiled, with two that may be, and a collective between them."""
    p = ProgramBuilder()
    x, _ = p.input("x"), p.input("positions")
    x = p.compute("take_features", features, x)
    with p.layer(0):
        x = p.compute("attn_norm", torch.relu, x)
        x = p.comm("attn_reduce", reduce, x)
        x = p.compute("mlp", torch.neg, x)
    return p.build(x)


class Fault:
    """Raises on one rank only, at its *call*-th call from 1 on, before it does what it stands for."""

    def __init__(self, rank: int, call: int = 1, then: Callable[..., Any] = lambda x: x) -> None:
        self.rank, self.left, self.then = rank, call, then

    def on(self, rank: int) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.left -= rank == self.rank
            if rank == self.rank and self.left == 0:
                raise RuntimeError("no such kernel")
            return self.then(*given)

        return run


FAULTS = {  # what fails, and at which call
    "inputs": ("inputs", 1),
    "an op that is never compiled": ("features", 1),
    "the same with other tokens": ("features", 2),
    "a collective": ("reduce", 1),
}


def compile_small(
    group: Any, monkeypatch: pytest.MonkeyPatch, **faults: Fault
) -> tuple[int, list[bool], list[dict[str, Any]]]:
    """Compile on one rank; return the number of compiled ops, which are, and what was logged."""
    log, rank = Log(), group.rank_in_group
    parts = {name: faults.get(name, Fault(-1)).on(rank) for name in ("inputs", "features", "reduce", "compile")}
    compiler = OpCompiler(make_small_config(), SimpleNamespace(), log, group, parts["inputs"])
    monkeypatch.setattr(compiler, "_compile", lambda fn, given: parts["compile"](fn))
    program = compiler.wrap(record_small(parts["features"], parts["reduce"]))
    done = compiler.compile(program)
    return done, [op.fn.is_compiled for op in program.ops if isinstance(op.fn, CompiledFunction)], log.said


@pytest.fixture
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "set_forward_context", lambda *_, **__: nullcontext())


@pytest.mark.usefixtures("no_context")
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_fails_on_any_rank_all_ops_stay_eager_on_all(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, call = FAULTS[fault]
    faults = {name: Fault(1, call)}
    outcomes = ThreadRanks(monkeypatch).run(lambda group: compile_small(group, monkeypatch, **faults))
    for outcome in outcomes:
        assert not isinstance(outcome, Exception), outcome
        done, compiled, said = outcome
        assert (done, compiled) == (0, [False, False])
        assert [(line["what"], line["reason"]) for line in said] == [
            (EAGER, "rank 1: RuntimeError('no such kernel')"),
        ]


@pytest.mark.usefixtures("no_context")
def test_an_op_that_one_rank_cannot_compile_stays_eager_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(0, 2, then=lambda fn: fn)
    outcomes = ThreadRanks(monkeypatch).run(lambda group: compile_small(group, monkeypatch, compile=fault))
    for done, compiled, said in outcomes:
        assert (done, compiled) == (1, [True, False])
        assert said[-1]["reason"] == "L0.mlp: RuntimeError: no such kernel"


@pytest.mark.usefixtures("no_context")
def test_all_ranks_compile_where_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = ThreadRanks(monkeypatch).run(lambda group: compile_small(group, monkeypatch))
    assert [(done, compiled) for done, compiled, _ in outcomes] == [(2, [True, True])] * 2


@pytest.mark.usefixtures("no_context")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_rank_stays_eager_and_says_why(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, call = FAULTS[fault]
    done, compiled, said = compile_small(ThreadGroup(0, 1), monkeypatch, **{name: Fault(0, call)})
    assert (done, compiled) == (0, [False, False])
    assert said == [{"what": EAGER, "reason": "RuntimeError('no such kernel')"}]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_with_features_of_images_is_compiled_and_answers_alike(tmp_path: Path, engines: Engines) -> None:
    """Its program is given embedded tokens and their features, which are wider than the hidden size."""
    model = make_vision_family(QWEN3, tmp_path / "model")
    options = {
        "attention_backend": "CPU_ATTN",
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 3, "video": 0},
        "mm_processor_cache_gb": 0,
        "max_model_len": 512,
        "enforce_eager": False,
    }
    engine = engines.get(1, "nobind", model, SETTINGS, **options)
    functions = find_functions(engine)
    assert [label for label, function in functions.items() if not function.is_compiled] == []
    requests = make_requests((1, 3, 0, 2, 1))
    engine.configure(DBO_MODE="off")
    unsplit = engine.generate(requests, tokens=3)
    engine.configure(**CHECKED)
    before = engine.count_split()
    assert find_difference(unsplit, engine.generate(requests, tokens=3)) < 1e-3
    assert engine.count_split() > before
