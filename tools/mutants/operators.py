"""What is put in the place of a node of the syntax tree to make a mutant."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

OPERATORS: Mapping[type[ast.AST], type[ast.AST]] = MappingProxyType(
    {
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.And: ast.Or,
        ast.Or: ast.And,
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Div,
        ast.Mod: ast.Mult,
        ast.BitOr: ast.BitAnd,
        ast.BitAnd: ast.BitOr,
    }
)
FUNCTIONS: Mapping[str, str] = MappingProxyType({"min": "max", "max": "min", "any": "all", "all": "any"})
GUARDS = frozenset({"strict"})  # arguments that only guard against mistakes of the caller, as in zip()


def propose(node: ast.AST) -> Iterator[ast.AST]:
    """Return each node that may take the place of another; `ast.Pass` drops a statement."""
    yield from _change_operator(node)
    match node:
        case ast.Constant():
            yield from _change_constant(node)
        case ast.Call():
            yield from _change_call(node)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield _set(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items) if len(items) > 1:
            if all(isinstance(item, ast.Constant) for item in items):
                yield from (_leave_out(node, "elts", items, index) for index in range(len(items)))
        case ast.comprehension(ifs=tests):
            yield from (_leave_out(node, "ifs", tests, index) for index in range(len(tests)))
        case ast.Slice():
            yield from (_set(node, end, None) for end in ("lower", "upper") if getattr(node, end) is not None)
        case ast.stmt():
            yield from _change_statement(node)


def _change_operator(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                yield _set(node, "ops", [*operators[:index], _turn(operator), *operators[index + 1 :]])
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield _set(node, "op", _turn(node.op))
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand


def _change_statement(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Return(value=ast.expr()) if not _is_false(node.value):
            yield ast.Return(ast.Constant(None))
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _change_constant(node: ast.Constant) -> Iterator[ast.AST]:
    match node.value:
        case bool():
            yield ast.Constant(not node.value)
        case int():
            yield ast.Constant(node.value + 1)
        case float():
            yield ast.Constant(2 * node.value if node.value else 1.0)


def _change_call(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        yield _set(node, "func", ast.Name(FUNCTIONS[node.func.id], ast.Load()))
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in GUARDS:
            yield _leave_out(node, "keywords", node.keywords, index)


def _turn(operator: ast.AST) -> ast.AST:
    return OPERATORS[type(operator)]()


def _leave_out(node: Node, field: str, items: list[ast.expr] | list[ast.keyword], left_out: int) -> Node:
    return _set(node, field, [item for index, item in enumerate(items) if index != left_out])


def _set(node: Node, field: str, value: object) -> Node:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return changed


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and not node.value
