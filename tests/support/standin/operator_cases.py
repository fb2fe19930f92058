"""What is called of every operator of the stand-in, with which inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WHOLES = (torch.int64, torch.int32)
NUMBERS = (*FLOATS, *WHOLES)
BOOL = (torch.bool,)
ALL = (*NUMBERS, *BOOL)
WITHOUT_FRACTIONS = (*WHOLES, *BOOL)
ROWS, COLUMNS = 4, 6

Input = Callable[[torch.dtype, torch.Generator], torch.Tensor]


def numbers(*shape: int) -> Input:
    """Numbers of either sign; for bool, true and false."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        least, end = (0, 2) if dtype == torch.bool else (-9, 10)
        return torch.randint(least, end, shape, generator=generator).to(dtype)

    return make


def positive(*shape: int) -> Input:
    """Numbers from 1 to 9."""
    return lambda dtype, generator: (torch.rand(shape, generator=generator) * 8 + 1).to(dtype)


def distinct(*shape: int) -> Input:
    """Whole numbers, each once: an order of them is the only one."""
    count = torch.Size(shape).numel()
    return lambda dtype, generator: torch.randperm(count, generator=generator).reshape(shape).to(dtype)


def flags(*shape: int) -> Input:
    return lambda dtype, generator: torch.randint(0, 2, shape, generator=generator).bool()


def places(end: int, *shape: int) -> Input:
    """Indices below an end, each at most once in a row."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        rows = [torch.randperm(end, generator=generator)[: shape[-1]] for _ in range(torch.Size(shape[:-1]).numel())]
        return torch.stack(rows).reshape(shape)

    return make


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the norm, and the means and reciprocal deviations, which torch_npu always has in float32."""
    return tuple(result.to(x.dtype) for result in torch.native_layer_norm(x, (COLUMNS,), weight, bias, 1e-3))


class Case(NamedTuple):
    """A call that reaches an operator; it takes tensors of either device and returns tensors or None."""

    operator: str
    call: Callable[..., Any]
    inputs: tuple[Input, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    captured: bool = True  # whether torch_npu can do it in a graph, that is, without waiting for the result


X = numbers(ROWS, COLUMNS)
POSITIVE = positive(ROWS, COLUMNS)
DISTINCT = distinct(ROWS, COLUMNS)
FLAGS = flags(ROWS, COLUMNS)
PLACES = places(ROWS, 3)
PLACES_IN_ROWS = places(COLUMNS, ROWS, 3)

ARITHMETIC = (
    Case("aclnnAdd", lambda a, b: torch.add(a, b, alpha=3), (X, X), NUMBERS),
    Case("aclnnAdds", lambda a: torch.add(a, 2, alpha=3), (X,), NUMBERS),
    Case("aclnnSub", lambda a, b: torch.sub(a, b, alpha=2), (X, X), NUMBERS),
    Case("aclnnSubs", lambda a: torch.sub(a, 2, alpha=3), (X,), NUMBERS),
    Case("aclnnRsubs", lambda a: torch.rsub(a, 2, alpha=3), (X,), NUMBERS),
    Case("aclnnMul", lambda a, b: a * b, (X, X), ALL),
    Case("aclnnMuls", lambda a: a * 3, (X,), NUMBERS),
    Case("aclnnDiv", lambda a, b: a / b, (X, POSITIVE), NUMBERS),
    Case("aclnnDivs", lambda a: a / 3, (X,), NUMBERS),
    Case("aclnnInplaceAdd", lambda a, b: a.add_(b, alpha=3), (X, X), NUMBERS),
    Case("aclnnInplaceAdds", lambda a: a.add_(2, alpha=3), (X,), NUMBERS),
    Case("aclnnInplaceSub", lambda a, b: a.sub_(b, alpha=3), (X, X), NUMBERS),
    Case("aclnnInplaceSubs", lambda a: a.sub_(2, alpha=3), (X,), NUMBERS),
    Case("aclnnInplaceMul", lambda a, b: a.mul_(b), (X, X), NUMBERS),
    Case("aclnnInplaceMuls", lambda a: a.mul_(3), (X,), NUMBERS),
    Case("aclnnInplaceDiv", lambda a, b: a.div_(b), (X, POSITIVE)),
    Case("aclnnInplaceDivs", lambda a: a.div_(3), (X,)),
    Case("aclnnFloorDivide", lambda a, b: a // b, (X, POSITIVE), NUMBERS),
    Case("aclnnFloorDivides", lambda a: a // 4, (X,), NUMBERS),
    Case("aclnnRemainderTensorTensor", lambda a, b: a % b, (X, POSITIVE), NUMBERS),
    Case("aclnnRemainderTensorScalar", lambda a: a % 4, (X,), NUMBERS),
    Case("aclnnPowTensorTensor", lambda a, b: a**b, (POSITIVE, X), FLOATS),
    Case("aclnnPowTensorScalar", lambda a: a**3, (X,), NUMBERS),
    Case("aclnnPowScalarTensor", lambda a: 2**a, (X,), FLOATS),
    Case("aclnnMaximum", torch.maximum, (X, X), NUMBERS),
    Case("aclnnMinimum", torch.minimum, (X, X), NUMBERS),
    Case("aclnnClampMin", lambda a: a.clamp_min(1), (X,), NUMBERS),
    Case("aclnnClamp", lambda a: (a.clamp(-1, 2), a.clamp(min=0), a.clamp(max=0)), (X,), NUMBERS),
    Case("aclnnAbs", torch.abs, (X,), NUMBERS),
    Case("aclnnNanToNum", lambda a: torch.nan_to_num(a / 0, 0.5, 2.0, -3.0), (X,)),
    Case("aclnnNeg", torch.neg, (X,), NUMBERS),
    Case("aclnnReciprocal", torch.reciprocal, (POSITIVE,)),
    Case("aclnnReciprocal", lambda a: 2 / a, (POSITIVE,)),
    Case("aclnnFloor", torch.floor, (X,)),
    Case("aclnnCeil", torch.ceil, (X,)),
    Case("aclnnRound", lambda a: (a.round(), (a.floor() / 2).round()), (X,)),  # halves go to the even side
)
FUNCTIONS = (
    Case("aclnnSqrt", torch.sqrt, (POSITIVE,)),
    Case("aclnnRsqrt", torch.rsqrt, (POSITIVE,)),
    Case("aclnnExp", torch.exp, (X,), (*FLOATS, torch.int64)),
    Case("aclnnLog", torch.log, (POSITIVE,)),
    Case("aclnnSin", torch.sin, (X,)),
    Case("aclnnCos", torch.cos, (X,)),
    Case("aclnnTanh", torch.tanh, (X,)),
    Case("aclnnSigmoid", torch.sigmoid, (X,)),
    Case("aclnnRelu", torch.relu, (X,)),
    Case("aclnnSilu", F.silu, (X,)),
    Case("aclnnGeluV2", lambda a: (F.gelu(a), F.gelu(a, approximate="tanh")), (X,)),
    Case("aclnnInplaceExp", torch.exp_, (X,)),
    Case("aclnnInplaceRsqrt", torch.rsqrt_, (POSITIVE,)),
    Case("aclnnInplaceTanh", torch.tanh_, (X,)),
    Case("aclnnInplaceSigmoid", torch.sigmoid_, (X,)),
    Case("aclnnInplaceRelu", torch.relu_, (X,)),
)
COMPARISONS = (
    Case("aclnnEqTensor", torch.eq, (X, X), NUMBERS),
    Case("aclnnEqScalar", lambda a: a == 1, (X,), NUMBERS),
    Case("aclnnNeTensor", torch.ne, (X, X), NUMBERS),
    Case("aclnnNeScalar", lambda a: a != 1, (X,), NUMBERS),
    Case("aclnnLtTensor", torch.lt, (X, X), NUMBERS),
    Case("aclnnLtScalar", lambda a: a < 1, (X,), NUMBERS),
    Case("aclnnLeTensor", torch.le, (X, X), NUMBERS),
    Case("aclnnLeScalar", lambda a: a <= 1, (X,), NUMBERS),
    Case("aclnnGtTensor", torch.gt, (X, X), NUMBERS),
    Case("aclnnGtScalar", lambda a: a > 1, (X,), NUMBERS),
    Case("aclnnGeTensor", torch.ge, (X, X), NUMBERS),
    Case("aclnnGeScalar", lambda a: a >= 1, (X,), NUMBERS),
    Case("aclnnBitwiseAndTensor", lambda a, b: a & b, (X, X), WITHOUT_FRACTIONS),
    Case("aclnnBitwiseAndScalar", lambda a: a & 6, (X,), WHOLES),
    Case("aclnnBitwiseOrTensor", lambda a, b: a | b, (X, X), WITHOUT_FRACTIONS),
    Case("aclnnBitwiseOrScalar", lambda a: a | 6, (X,), WHOLES),
    Case("aclnnBitwiseXorTensor", lambda a, b: a ^ b, (X, X), WITHOUT_FRACTIONS),
    Case("aclnnBitwiseXorScalar", lambda a: a ^ 6, (X,), WHOLES),
    Case("aclnnBitwiseNot", torch.bitwise_not, (X,), WITHOUT_FRACTIONS),
    Case("aclnnInplaceBitwiseAndTensor", lambda a, b: a.__iand__(b), (X, X), WITHOUT_FRACTIONS),
    Case("aclnnInplaceBitwiseAndScalar", lambda a: a.__iand__(6), (X,), WHOLES),
    Case("aclnnLogicalAnd", torch.logical_and, (X, X), ALL),
    Case("aclnnLogicalOr", torch.logical_or, (X, X), ALL),
    Case("aclnnLogicalXor", torch.logical_xor, (X, X), BOOL),
    Case("aclnnLogicalNot", torch.logical_not, (X,), ALL),
    Case("aclnnInplaceLogicalAnd", lambda a, b: a.logical_and_(b), (X, X), BOOL),
    Case("aclnnInplaceLogicalOr", lambda a, b: a.logical_or_(b), (X, X), BOOL),
    Case("aclnnIsFinite", lambda a, b: torch.isfinite(a / b), (X, lambda *_: torch.arange(24).reshape(4, 6) % 2)),
    Case("aclnnIsNegInf", lambda a: torch.isneginf(a.log()), (FLAGS,), BOOL),
    Case("aclnnIsClose", lambda a, b: torch.isclose(a, b, rtol=0.1, atol=0.5), (X, X), NUMBERS),
    Case(
        "aclnnIsClose",
        lambda a: torch.isclose(a / a.floor(), a / a.floor(), equal_nan=True),
        (lambda *_: torch.eye(4),),
    ),
    Case("aclnnSWhere", lambda a, b, mask: torch.where(mask, a, b), (X, X, FLAGS), NUMBERS),
    Case("aclnnInplaceMaskedFillScalar", lambda a, mask: a.masked_fill_(mask, 3), (X, FLAGS), NUMBERS),
    Case("aclnnInplaceMaskedFillTensor", lambda a, mask, b: a.masked_fill_(mask, b), (X, FLAGS, numbers()), NUMBERS),
)
PRODUCTS = (
    Case("aclnnMm", torch.mm, (X, numbers(6, 5))),
    Case("aclnnMatmul", F.linear, (X, numbers(5, 6))),
    Case("aclnnMatmul", torch.matmul, (X, numbers(6))),
    Case("aclnnMatmul", torch.matmul, (numbers(2, 3, 6), numbers(6, 5))),
    Case("aclnnBatchMatMul", torch.bmm, (numbers(2, 4, 6), numbers(2, 6, 5))),
    Case("aclnnAddmm", lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), (numbers(5), X, numbers(6, 5))),
    Case("aclnnAddmm", F.linear, (X, numbers(5, 6), numbers(5))),
    Case("aclnnInplaceAddmm", lambda c, a, b: c.addmm_(a, b, beta=2, alpha=0.5), (numbers(4, 5), X, numbers(6, 5))),
    Case(
        "aclnnBaddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5),
        (numbers(2, 4, 5), numbers(2, 4, 6), numbers(2, 6, 5)),
    ),
    Case("aclnnDot", torch.dot, (numbers(6), numbers(6))),
    Case("aclnnConvolution", F.conv3d, (numbers(2, 3, 4, 6, 6), numbers(5, 3, 2, 3, 3), numbers(5))),
    Case("aclnnConvolution", lambda a, w: F.conv2d(a, w, None, 2, 1), (numbers(2, 4, 6, 6), numbers(4, 4, 3, 3))),
    Case("aclnnConvolution", lambda a, w: F.conv1d(a, w, groups=2), (numbers(2, 4, 6), numbers(4, 2, 3))),
)
COPIES = (
    Case("aclnnInplaceCopy", lambda a, b: a.copy_(b), (X, X), ALL),
    Case("aclnnInplaceCopy", lambda a, b: a.copy_(b), (X, numbers(6)), NUMBERS),
    Case("aclnnInplaceCopy", lambda a: (a.t().contiguous(), a[:, 1:4].clone()), (X,), ALL),
    Case("aclnnInplaceCopy", lambda a: a[:1].expand(3, 6).contiguous(), (X,), NUMBERS),
    Case("aclnnInplaceCopy", lambda a: tuple(a.to(dtype) for dtype in ALL if dtype != a.dtype), (X,), ALL),
    Case("aclnnInplaceFillScalar", lambda a: a.fill_(3), (X,), NUMBERS),
    Case("aclnnInplaceFillScalar", lambda a: torch.full_like(a, 7), (X,), NUMBERS),
    Case("aclnnInplaceFillTensor", lambda a, b: a.fill_(b), (X, numbers()), NUMBERS),
    Case("aclnnInplaceZero", lambda a: a.zero_(), (X,), ALL),
    Case("aclnnInplaceZero", torch.zeros_like, (X,), NUMBERS),
    Case("aclnnInplaceOne", lambda a: torch.ones(a.shape, dtype=a.dtype, device=a.device), (X,), ALL),
    Case("aclnnArange", lambda a: torch.arange(2, 30, 3, dtype=a.dtype, device=a.device), (X,), NUMBERS),
    Case("aclnnLinspace", lambda a: torch.linspace(-1, 2, 7, dtype=a.dtype, device=a.device), (X,)),
    Case("aclnnCat", lambda a, b: torch.cat([a, b], 1), (X, X), ALL),
    Case("aclnnStack", lambda a, b: torch.stack([a, b], 1), (X, X), NUMBERS),
    Case("aclnnCat", lambda a: torch.cat(a.chunk(3, 1)[1:] + a.split([1, 5], 1), 1), (X,), NUMBERS),
    Case("aclnnRepeat", lambda a: a.repeat(2, 3), (X,), NUMBERS),
    Case("aclnnRepeatInterleaveIntWithDim", lambda a: (a.repeat_interleave(2, 0), a.repeat_interleave(3, 1)), (X,)),
    Case("aclnnRepeatInterleave", lambda i: torch.repeat_interleave(i + 3, i), (PLACES,), captured=False),
    Case("aclnnRoll", lambda a: (torch.roll(a, 1), torch.roll(a, (1, 2), (0, 1))), (X,), NUMBERS),
    Case("aclnnFlip", lambda a: a.flip(0, 1), (X,), NUMBERS),
    Case("aclnnTril", lambda a: a.tril(-1), (X,), NUMBERS),
    Case("aclnnTriu", lambda a: a.triu(1), (X,), NUMBERS),
    Case("aclnnConstantPadNd", lambda a: F.pad(a, (1, 2, 0, 1), value=3), (X,), NUMBERS),
)
REDUCTIONS = (
    Case("aclnnReduceSum", lambda a: (a.sum(), a.sum(1), a.sum(0, keepdim=True, dtype=torch.float32)), (X,), ALL),
    Case("aclnnMean", lambda a: (a.mean(), a.mean(-1, keepdim=True), a.mean(0, dtype=torch.float32)), (X,)),
    Case("aclnnAny", lambda a: (a.any(), a.any(1), a.any(0, keepdim=True)), (X,), BOOL),
    Case("aclnnAll", lambda a: (a.all(), a.all(1), a.all(0, keepdim=True)), (X,), BOOL),
    Case("aclnnAmax", lambda a: (a.amax((0, 1)), a.amax(1, keepdim=True)), (X,), NUMBERS),
    Case("aclnnAmin", lambda a: (a.amin((0, 1)), a.amin(1, keepdim=True)), (X,), NUMBERS),
    Case("aclnnMax", torch.max, (X,), NUMBERS),
    Case("aclnnMin", torch.min, (X,), NUMBERS),
    Case("aclnnArgMax", lambda a: (a.argmax(), a.argmax(1), a.argmax(0, keepdim=True)), (DISTINCT,), NUMBERS),
    Case("aclnnArgMin", lambda a: (a.argmin(), a.argmin(1), a.argmin(0, keepdim=True)), (DISTINCT,), NUMBERS),
    Case("aclnnMaxDim", lambda a: (*a.max(1), *a.max(0, keepdim=True)), (DISTINCT,), NUMBERS),
    Case("aclnnMinDim", lambda a: (*a.min(1), *a.min(0, keepdim=True)), (DISTINCT,), NUMBERS),
    Case("aclnnProd", lambda a: (a.prod(), a.prod(dtype=torch.float32)), (X,), (torch.float32, *WHOLES)),
    Case(
        "aclnnProdDim",
        lambda a: (a.prod(1), a.prod(0, keepdim=True, dtype=torch.float32)),
        (X,),
        (torch.float32, *WHOLES),
    ),
    Case("aclnnCumsum", lambda a: (a.cumsum(1), a.cumsum(0, dtype=torch.float32)), (X,), NUMBERS),
    Case("aclnnHistc", lambda a: (torch.histc(a, 4, -2, 2), torch.histc(a, 5, 0, 3)), (X,)),
    Case(
        "aclnnLinalgVectorNorm",
        lambda a: (a.norm(), torch.linalg.vector_norm(a, 1, dim=1, keepdim=True, dtype=torch.float32)),
        (X,),
    ),
    Case("aclnnSort", lambda a: (*a.sort(1), *a.sort(0, descending=True)), (DISTINCT,), NUMBERS),
    Case("aclnnSort", lambda a: torch.argsort(a, dim=1, stable=True), (X,), NUMBERS),
    Case("aclnnTopk", lambda a: (*a.topk(3), *a.topk(2, 0, largest=False)), (DISTINCT,), NUMBERS),
)
INDEXED = (
    Case("aclnnIndex", lambda a, i: (a[i], a[:, i], a[i, i + 1]), (X, PLACES), ALL),
    Case("aclnnIndex", lambda a, mask: a[mask], (X, FLAGS), NUMBERS, captured=False),
    Case("aclnnIndexPutImpl", lambda a, i, b: a.index_put_((i,), b), (X, PLACES, numbers(3, 6)), NUMBERS),
    Case("aclnnIndexPutImpl", lambda a, i, b: a.index_put_((i % 2,), b, accumulate=True), (X, PLACES, numbers(3, 6))),
    Case("aclnnIndexPutImpl", lambda a, i: a.__setitem__((slice(None), i), 1), (X, PLACES), NUMBERS),
    Case("aclnnIndexSelect", lambda a, i: a.index_select(1, i), (X, PLACES), NUMBERS),
    Case("aclnnEmbedding", lambda a, i: F.embedding(i, a), (X, PLACES)),
    Case("aclnnGather", lambda a, i: a.gather(1, i), (X, PLACES_IN_ROWS), NUMBERS),
    Case("aclnnIndexAdd", lambda a, i, b: a.index_add_(0, i % 2, b), (X, PLACES, numbers(3, 6)), NUMBERS),
    Case("aclnnIndexAdd", lambda a, i, b: a.index_add(1, i, b, alpha=2), (X, PLACES, numbers(4, 3)), NUMBERS),
    Case("aclnnInplaceIndexCopy", lambda a, i, b: a.index_copy_(0, i, b), (X, PLACES, numbers(3, 6)), NUMBERS),
    Case("aclnnInplaceIndexFillTensor", lambda a, i: a.index_fill_(0, i, 5), (X, PLACES), NUMBERS, captured=False),
    Case("aclnnScatter", lambda a, i, b: a.scatter(1, i, b), (X, PLACES_IN_ROWS, X), NUMBERS),
    Case("aclnnInplaceScatter", lambda a, i, b: a.scatter_(1, i, b), (X, PLACES_IN_ROWS, X), NUMBERS),
    Case("aclnnScatterValue", lambda a, i: a.scatter(1, i, 5), (X, PLACES_IN_ROWS), NUMBERS),
    Case("aclnnInplaceScatterValue", lambda a, i: a.scatter_(1, i, 5), (X, PLACES_IN_ROWS), NUMBERS),
    Case("aclnnScatterAdd", lambda a, i, b: a.scatter_add_(1, i % 2, b), (X, PLACES_IN_ROWS, X), NUMBERS),
    Case("aclnnNonzero", torch.nonzero, (FLAGS,), BOOL, captured=False),
    Case("aclnnNonzeroV2", lambda a, mask: a[mask], (X, FLAGS), NUMBERS, captured=False),
    Case("aclnnMaskedSelect", torch.masked_select, (X, FLAGS), NUMBERS, captured=False),
)
NORMS = (
    Case("aclnnSoftmax", lambda a: (a.softmax(1), a.softmax(0, dtype=torch.float32)), (X,)),
    Case("aclnnLogSoftmax", lambda a: a.log_softmax(1), (X,)),
    Case("aclnnLayerNorm", lambda a, w, b: layer_norm(a, w, b), (X, numbers(6), numbers(6))),
    Case("aclnnLayerNorm", lambda a: F.layer_norm(a, (6,)), (X,)),
)
CASES = (*ARITHMETIC, *FUNCTIONS, *COMPARISONS, *PRODUCTS, *COPIES, *REDUCTIONS, *INDEXED, *NORMS)

# Operators whose calls CPU tensors do not know, or whose results are random: they have tests of their own.
FUSED = ("aclnnRmsNorm", "aclnnAddRmsNorm", "aclnnSwiGlu", "aclnnCast", "aclnnEqual")
RANDOM = (
    "aclnnInplaceUniform",
    "aclnnInplaceNormal",
    "aclnnNormalFloatFloat",
    "aclnnInplaceRandom",
    "aclnnInplaceBernoulli",
    "aclnnRandperm",
)
ATTENTION = (
    "aclnnFusedInferAttentionScoreV3",
    "aclnnFusedInferAttentionScoreV4",
    "aclnnFusedInferAttentionScoreV5",
)
