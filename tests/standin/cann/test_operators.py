"""Every operator of the stand-in, called through torch_npu, against the same call of torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standin.cann.build import lib, list_symbols
from tests.standin.cann.cann import StandIn
from tests.support.standin.operator_cases import ALL, ATTENTION, CASES, FLOATS, FUSED, NUMBERS, RANDOM, Case

# torch_npu says so once for some operators; the stand-in knows no other format.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")

SLOW = 0.1  # seconds
BEYOND_FLOAT64 = 2**53 + 1  # the first whole number that float64 does not have
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.transpose(0, -1),
    "sliced": lambda base: base[(slice(1, -1),) * base.dim()],
}


def make_base(tensor: torch.Tensor, view: str) -> torch.Tensor:
    """Return a tensor of which the view is *tensor*."""
    if view == "sliced":
        base = torch.full([size + 2 for size in tensor.shape], 1).to(tensor.dtype)
        VIEWS[view](base).copy_(tensor)
        return base
    return VIEWS[view](tensor).clone(memory_format=torch.contiguous_format) if tensor.dim() else tensor.clone()


def make_view(base: torch.Tensor, view: str) -> torch.Tensor:
    return VIEWS[view](base) if base.dim() else base


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [make(dtype, generator) for make in case.inputs]


@contextmanager
def launching(standin: StandIn, *operators: str) -> Iterator[None]:
    """Fail unless the operators run meanwhile."""
    torch.npu.synchronize()
    with standin.trace() as kernels:
        yield
        torch.npu.synchronize()
    names = {f"aclnn{kernel.name}" for kernel in kernels}
    assert set(operators) <= names, f"not launched: {set(operators) - names}; launched: {sorted(names)}"


def assert_same(found: Any, expected: Any) -> None:
    """Compare tensors, or tuples of them, in value, shape and type."""
    if expected is None or isinstance(expected, tuple):
        assert type(found) is type(expected)
        for one, other in zip(found or (), expected or (), strict=True):
            assert_same(one, other)
    else:
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


def name_case(case: Case) -> str:
    return case.operator


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case.operator}-{dtype}") for case in CASES for dtype in case.dtypes],
)
def test_an_operator_gives_what_the_cpu_gives(standin: StandIn, case: Case, dtype: torch.dtype, view: str) -> None:
    bases = [make_base(tensor, view) for tensor in make_inputs(case, dtype)]
    npu_bases = [base.npu() for base in bases]
    with launching(standin, case.operator):
        found = case.call(*(make_view(base, view) for base in npu_bases))
    expected = case.call(*(make_view(base, view) for base in bases))
    assert_same(found, expected)
    # What was changed in place changed in the same way, and nothing around it.
    assert_same(tuple(npu_bases), tuple(bases))


@pytest.mark.parametrize("case", [case for case in CASES if case.captured], ids=name_case)
def test_a_graph_replays_an_operator(standin: StandIn, case: Case) -> None:
    dtype = case.dtypes[0]
    inputs = [tensor.npu() for tensor in make_inputs(case, dtype)]
    case.call(*inputs)  # torch_npu looks up the operator when it is first called
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        found = case.call(*inputs)
    for seed in (1, 2):
        fresh = make_inputs(case, dtype, seed)
        for tensor, value in zip(inputs, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.npu.synchronize()
        assert_same(found, case.call(*fresh))


def test_every_operator_has_a_test(standin_folder: Path) -> None:
    symbols = list_symbols(lib(standin_folder, "opapi"), "--defined-only")
    launchers = {name for name in symbols if name.startswith("aclnn") and not name.endswith("GetWorkspaceSize")}
    assert launchers == {case.operator for case in CASES} | {*FUSED, *RANDOM, *ATTENTION}
    assert {f"{name}GetWorkspaceSize" for name in launchers} <= symbols


LARGE = (BEYOND_FLOAT64, -BEYOND_FLOAT64, 2**63 - 1, -(2**63), 2**62, 3)
EXACT: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda a: a + a.flip(0),
    "add number": lambda a: a + BEYOND_FLOAT64,
    "subtract": lambda a: a - a.flip(0),
    "subtract from number": lambda a: BEYOND_FLOAT64 - a,
    "multiply": lambda a: a * a.flip(0),
    "multiply by number": lambda a: a * BEYOND_FLOAT64,
    "add in place": lambda a: a.add_(BEYOND_FLOAT64).mul_(BEYOND_FLOAT64),
    "negate": lambda a: -a,
    "floor": lambda a: (a // 7, a % 7),
    "sum": lambda a: (a.sum(), a.cumsum(0)),
    "extremes": lambda a: (a.max(), a.min(), a.argmax(), a.clamp(max=BEYOND_FLOAT64)),
    "compare": lambda a: (a == BEYOND_FLOAT64, a == BEYOND_FLOAT64 - 1, a > BEYOND_FLOAT64 - 1),
    "bits": lambda a: (a & BEYOND_FLOAT64, ~a),
    "fill": lambda a: torch.full_like(a, BEYOND_FLOAT64),
    "scatter": lambda a: a.scatter(0, torch.zeros_like(a), BEYOND_FLOAT64),
    "index": lambda a: a.index_add(0, torch.arange(6, device=a.device) % 2, a),
    "range": lambda a: torch.arange(BEYOND_FLOAT64, BEYOND_FLOAT64 + 5, device=a.device),
}


@pytest.mark.parametrize("call", EXACT.values(), ids=EXACT)
def test_int64_is_exact_and_wraps(standin: StandIn, call: Callable[[torch.Tensor], Any]) -> None:
    values = torch.tensor(LARGE)
    assert_same(call(values.npu()), call(values))


EMPTY: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda a: (a + a, a * 2, a.exp(), a.add_(1)),
    "comparison": lambda a: (a == a, a > 1, torch.where(a > 0, a, a)),
    "copy": lambda a: (a.clone(), a.t().contiguous(), a.to(torch.bfloat16), a.repeat(2, 1)),
    "cat": lambda a: torch.cat([a, torch.ones(2, 6, device=a.device)]),
    "sum": lambda a: (a.sum(), a.sum(0), a.sum(1)),
    "any": lambda a: ((a > 0).any(), (a > 0).all()),
    "matmul": lambda a: (a @ torch.ones(6, 5, device=a.device), a.t() @ a),
    "index": lambda a: a[:, torch.zeros(2, dtype=torch.int64, device=a.device)],
    "no index": lambda a: torch.ones(3, 6, device=a.device)[torch.zeros(0, dtype=torch.int64, device=a.device)],
    "no place": lambda a: torch.ones(3, 6, device=a.device).index_select(1, torch.arange(0, device=a.device)),
    "no place to write": lambda a: torch.ones(3, 6, device=a.device).index_put_((a[:, 0].long(),), a.sum() + 5),
    "no whole numbers to write": lambda a: torch.arange(6, device=a.device).index_put_(
        (a[:, 0].long(),), a.sum().long()
    ),
    "nothing found": lambda a: torch.zeros(3, 6, device=a.device).nonzero(),
    "nothing selected": lambda a: torch.ones(3, device=a.device)[torch.zeros(3, device=a.device) > 0],
    "range": lambda a: torch.arange(0, device=a.device),
    "softmax": lambda a: a.softmax(1),
}


@pytest.mark.parametrize("call", EMPTY.values(), ids=EMPTY)
def test_an_empty_tensor_is_a_tensor(standin: StandIn, call: Callable[[torch.Tensor], Any]) -> None:
    assert_same(call(torch.ones(0, 6).npu()), call(torch.ones(0, 6)))


def test_torch_npu_waits_for_a_result_of_unknown_size(standin: StandIn) -> None:
    numbers = torch.arange(10).npu()
    standin.delay("GtScalar", SLOW)
    standin.delay("Nonzero", SLOW)
    found = (numbers > 6).nonzero().flatten().tolist()
    standin.calm()
    assert found == [7, 8, 9]


def test_a_kernel_holds_its_arguments_by_value(standin: StandIn) -> None:
    """torch_npu destroys the descriptors while the kernel waits for a slow one before it."""
    inputs = [torch.full((3,), number) for number in range(20)]
    there = [tensor.npu() for tensor in inputs]
    standin.delay("InplaceMuls", SLOW)
    there[0].mul_(2)
    found = [torch.cat([a.roll(1), a + number, a.sum(0, keepdim=True)]) for number, a in enumerate(there)]
    standin.calm()
    expected = [torch.cat([a.roll(1), a + number, a.sum(0, keepdim=True)]) for number, a in enumerate(inputs)]
    assert_same(tuple(found), tuple(expected))


def test_an_operator_that_is_missing_raises(standin: StandIn) -> None:
    with pytest.raises(RuntimeError, match="aclnnErfinv"):
        torch.ones(3).npu().erfinv()


def test_values_come_back_to_python(standin: StandIn) -> None:
    values = torch.tensor([[1.5, -2.0], [0.0, 4.0]]).npu()
    assert values.tolist() == [[1.5, -2.0], [0.0, 4.0]]
    assert values[1, 1].item() == 4.0
    assert bool((values > 3).any())
    assert not bool((values > 3).all())
    assert torch.tensor(LARGE).npu().tolist() == list(LARGE)
    assert "1.5000" in repr(values)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_equal_compares_whole_tensors(standin: StandIn, dtype: torch.dtype) -> None:
    one = torch.arange(6).to(dtype).npu()
    other = one.clone()
    with launching(standin, "aclnnEqual"):
        assert torch.equal(one, other)
    other[4] = 0
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_assert_close_compares_npu_tensors(standin: StandIn, dtype: torch.dtype) -> None:
    one = torch.arange(6).to(dtype).npu()
    other = one.clone()
    torch.testing.assert_close(one, other)
    other[3] = 100
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 6"):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("start", "end"), [(start, end) for start in NUMBERS for end in ALL if start != end])
def test_a_cast_is_a_conversion(standin: StandIn, start: torch.dtype, end: torch.dtype) -> None:
    import torch_npu

    x = torch.tensor([[-2.75, 0.0, 1.5], [100.0, -1.0, 0.25]]).to(start)
    with launching(standin, "aclnnCast"):
        found = torch_npu.npu_dtype_cast(x.npu().t(), end)
    assert_same(found, x.t().to(end))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_divides_by_the_root_of_the_mean_square(standin: StandIn, dtype: torch.dtype) -> None:
    import torch_npu

    x, gamma = torch.randn(2, 3, 8).to(dtype), torch.randn(8).to(dtype)
    with launching(standin, "aclnnRmsNorm"):
        y, reciprocal = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-3)
    expected = x.float().square().mean(-1, keepdim=True).add(1e-3).rsqrt()
    assert_same(reciprocal, expected)
    assert_same(y, (x.float() * expected * gamma.float()).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_gives_the_sum_as_well(standin: StandIn, dtype: torch.dtype) -> None:
    import torch_npu

    x, residual, gamma = (torch.randn(shape).to(dtype) for shape in ((3, 8), (3, 8), (8,)))
    with launching(standin, "aclnnAddRmsNorm"):
        y, _, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-3)
    assert_same(total, x + residual)
    assert_same(y, torch.nn.functional.rms_norm((x + residual).float(), (8,), gamma.float(), 1e-3).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu_gates_one_half_with_the_other(standin: StandIn, dtype: torch.dtype) -> None:
    import torch_npu

    x = torch.randn(4, 8).to(dtype)
    with launching(standin, "aclnnSwiGlu"):
        by_columns, by_rows = torch_npu.npu_swiglu(x.npu()), torch_npu.npu_swiglu(x.npu(), dim=0)
    assert_same(by_columns, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
    assert_same(by_rows, torch.nn.functional.silu(x[:2]) * x[2:])


COUNT = 2000
DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "aclnnInplaceUniform": lambda: torch.empty(COUNT, device="npu").uniform_(2, 4),
    "aclnnInplaceNormal": lambda: torch.empty(COUNT, device="npu").normal_(2, 3),
    "aclnnNormalFloatFloat": lambda: torch.normal(2.0, 3.0, (COUNT,), device="npu"),
    "aclnnInplaceRandom": lambda: torch.randint(3, COUNT, (COUNT,), device="npu"),
    "aclnnInplaceBernoulli": lambda: torch.empty(COUNT, device="npu").bernoulli_(0.3),
    "aclnnRandperm": lambda: torch.randperm(COUNT, device="npu"),
}


@pytest.mark.parametrize("operator", RANDOM)
def test_random_numbers_follow_from_the_seed(standin: StandIn, operator: str) -> None:
    torch.npu.manual_seed(7)
    with launching(standin, operator):
        first, second = DRAWS[operator](), DRAWS[operator]()
    torch.npu.manual_seed(7)
    assert torch.equal(first, DRAWS[operator]())
    assert not torch.equal(first, second)
    torch.npu.manual_seed(8)
    assert not torch.equal(first, DRAWS[operator]())


def test_random_numbers_are_distributed_as_asked(standin: StandIn) -> None:
    torch.npu.manual_seed(7)
    drawn = {name: draw().cpu() for name, draw in DRAWS.items()}
    uniform, coins, whole = (drawn[f"aclnnInplace{name}"] for name in ("Uniform", "Bernoulli", "Random"))
    assert 2 <= uniform.min() < 2.1
    assert 3.9 < uniform.max() < 4
    for normal in (drawn["aclnnInplaceNormal"], drawn["aclnnNormalFloatFloat"]):
        assert abs(normal.mean() - 2) < 0.3
        assert abs(normal.std() - 3) < 0.3
    assert set(coins.tolist()) == {0.0, 1.0}
    assert abs(coins.mean() - 0.3) < 0.05
    assert 3 <= whole.min() < 50
    assert COUNT - 50 < whole.max() < COUNT
    assert sorted(drawn["aclnnRandperm"].tolist()) == list(range(COUNT))


def test_random_numbers_need_no_arguments(standin: StandIn) -> None:
    assert 0.4 < torch.rand(COUNT, device="npu").mean().item() < 0.6
    assert abs(torch.randn(COUNT, device="npu").mean().item()) < 0.2
