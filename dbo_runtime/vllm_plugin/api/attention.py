"""vLLM's attention modules, divided at the call of attention itself. Read against vLLM 0.23.0 to 0.33.0.

The forward of nearly all of them is `q, k, v = ...; attended = self.attn(q, k, v); return ...`. What comes before and
after that call is token-wise: projections, norms, rotary embedding, gates. So the forward's own source is divided
there, and each family, in each release, keeps what it computes. Linear attention has an operator in place of the call,
which writes to a tensor that the forward has made: `torch.ops.vllm.NAME(qkv, b, a, out, ...)`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch

from dbo_runtime.adapters.communication import DividedAttention
from dbo_runtime.vllm_plugin.api.known import REDUCING_NORMS

CORE = "attn"
OPERATORS = "torch.ops.vllm."
DISPATCHED = "_forward_method"  # attribute with the platform's forward, where the class's own calls that
OF_THE_STEP = frozenset({"get_forward_context", "get_cos_and_sin_slice", "_EXTRA_CTX"})
"""Names of what holds for all tokens of a step. A forward that reads them outside of attention is not divided."""


class Halves(NamedTuple):
    """A forward in two functions.

    Attributes:
        before: takes the module and the forward's arguments; returns the arguments of attention, then *kept* values.
        after: takes the module, the result of attention and the *kept* values; returns the forward's result.
        taken: number of arguments of attention.
        kept: number of further values that the second function reads.
        core: takes the module and the arguments of attention, and returns its result, if attention is an operator;
            otherwise None.
        written: number of the argument that an operator writes its result to; None if attention is no operator.
    """

    before: Callable[..., tuple[Any, ...]]
    after: Callable[..., torch.Tensor]
    taken: int
    kept: int
    core: Callable[..., torch.Tensor] | None = None
    written: int | None = None


def divide_attention(attention: torch.nn.Module, attend: Callable[..., Any]) -> DividedAttention | None:
    """Return the parts of an attention module that is called by *attend*; None if its forward has another form."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    core = getattr(attention, CORE, attention)
    if not isinstance(core, AttentionLayerBase) or _reduces_sums(attention):
        return None
    if "forward" in vars(attention) or attention._forward_hooks or attention._forward_pre_hooks:
        return None
    forward = type(attention).forward
    if DISPATCHED in forward.__code__.co_names:
        forward = getattr(getattr(attention, DISPATCHED), "__func__", forward)
    halves = divide_forward(forward)
    if halves is None or (halves.core is None) != (core is not attention):
        return None
    project = partial(attend, _Before(attention, halves.before))
    run = core if halves.core is None else partial(halves.core, attention)
    finish = partial(halves.after, attention)
    return DividedAttention(project, run, finish, halves.taken, halves.kept, halves.written)


@lru_cache(maxsize=256)
def divide_forward(forward: Callable[..., Any]) -> Halves | None:
    """Return a forward in two functions, before and after attention itself; None if that is not its form."""
    try:
        source, first_line = inspect.getsourcelines(forward)
        (function,) = ast.parse(textwrap.dedent("".join(source))).body
        is_imported = _is_imported(forward)
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or forward.__code__.co_freevars:
        return None
    ast.increment_lineno(function, first_line - 1)
    return _divide(function, forward) if is_imported else None


def _is_imported(forward: Any) -> bool:
    """Return whether the forward's file still says what Python has imported from it."""
    lines, _ = inspect.findsource(forward)
    code, found = forward.__code__, [compile("".join(lines), forward.__code__.co_filename, "exec")]
    while found:
        other = found.pop()
        if (other.co_name, other.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return (other.co_code, other.co_names) == (code.co_code, code.co_names)
        found += [each for each in other.co_consts if isinstance(each, CodeType)]
    return False


def _divide(function: ast.FunctionDef, forward: Any) -> Halves | None:
    more = function.args.posonlyargs or function.args.kwonlyargs or function.args.vararg
    modules = [index for index, statement in enumerate(function.body) if CORE in _list_attributes(statement)]
    calls = modules or [index for index, statement in enumerate(function.body) if _calls_operator(statement)]
    if more or len(calls) != 1:
        return None
    head, call, tail = function.body[: calls[0]], function.body[calls[0]], function.body[calls[0] + 1 :]
    given, absent = _list_parameters(function)
    tail = _drop_branches(tail, absent)
    made, read = _list_names(head, ast.Store), _list_names(tail, ast.Load)
    match call:
        case ast.Assign(targets=[ast.Name(id=attended)], value=ast.Call(func, arguments, keywords=[])):
            taken = [argument.id for argument in arguments if isinstance(argument, ast.Name)]
            if ast.unparse(func) != f"self.{CORE}" or len(taken) < len(arguments):
                return None
        case ast.Expr() if not modules:
            taken = sorted(_list_names([call], ast.Load) & made)
            written = read & {*taken}
            if len(written) != 1:
                return None
            (attended,) = written
        case _:
            return None
    further = {function.args.kwarg.arg} if function.args.kwarg else set()  # nothing is passed so
    needs_more = read & {*given[1:], *absent} or (further | absent) & (read | _list_names(head, ast.Load))
    if needs_more or OF_THE_STEP & {*forward.__code__.co_names} or _returns(head) or not _ends(tail):
        return None
    kept = sorted(read & made - {attended})
    core = None
    if not isinstance(call, ast.Assign):
        core = _compile(function, forward, ["self", *taken], [call, ast.Return(ast.Name(attended, ast.Load()))])
    return Halves(
        _compile(function, forward, given, [*head, _return_all([*taken, *kept])]),
        _compile(function, forward, ["self", attended, *kept], tail),
        len(taken),
        len(kept),
        core,
        core and taken.index(attended),
    )


def _calls_operator(statement: ast.stmt) -> bool:
    """Return whether a statement is, or has in it, a call of one of vLLM's operators whose result it does not take."""
    called = (node.value for node in ast.walk(statement) if isinstance(node, ast.Expr))
    return any(isinstance(call, ast.Call) and ast.unparse(call.func).startswith(OPERATORS) for call in called)


def _list_parameters(function: ast.FunctionDef) -> tuple[list[str], set[str]]:
    """Return the parameters of a forward that are given, and those that are not: their default is None."""
    parameters, defaults = [each.arg for each in function.args.args], function.args.defaults
    optional = parameters[len(parameters) - len(defaults) :]
    absent = {name for name, value in zip(optional, defaults, strict=True) if ast.unparse(value) == "None"}
    return [name for name in parameters if name not in absent], absent


def _drop_branches(statements: Sequence[ast.stmt], absent: set[str]) -> list[ast.stmt]:
    """Return statements without `if NAME is not None: ...` for names that are None."""
    tests = {f"{name} is not None" for name in absent}
    return [each for each in statements if not (isinstance(each, ast.If) and ast.unparse(each.test) in tests)]


def _return_all(names: Sequence[str]) -> ast.Return:
    return ast.Return(ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load()))


def _compile(
    function: ast.FunctionDef, forward: Any, arguments: Sequence[str], body: Sequence[ast.stmt]
) -> Callable[..., Any]:
    """Return a function with this body, whose lines are those of the forward's file, so that errors show them."""
    half = copy(function)
    half.args, half.body, half.returns = copy(function.args), [*body], None
    half.args.args, half.args.defaults, half.args.kwarg = [ast.arg(name) for name in arguments], [], None
    made: dict[str, Callable[..., Any]] = {}
    code = compile(ast.fix_missing_locations(ast.Module([half], [])), forward.__code__.co_filename, "exec")
    exec(code, forward.__globals__, made)  # the statements of vLLM's own forward, and nothing else
    return made[function.name]


def _list_attributes(statement: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}


def _list_names(statements: Sequence[ast.stmt], use: type[ast.expr_context]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, use)}


def _returns(statements: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Return) for statement in statements for node in ast.walk(statement))


def _ends(statements: Sequence[ast.stmt]) -> bool:
    """Return whether statements return a value, once, at their end."""
    return bool(statements) and isinstance(statements[-1], ast.Return) and not _returns(statements[:-1])


def _reduces_sums(attention: torch.nn.Module) -> bool:
    return any(type(part).__name__ in REDUCING_NORMS for part in attention.modules())


class _Before:
    """Stands for an attention module whose call ends before attention; all else is the module's own."""

    def __init__(self, attention: torch.nn.Module, before: Callable[..., tuple[Any, ...]]) -> None:
        self._attention = attention
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self._before(self._attention, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)
