"""All mutations of a module, and the sample of them that is tried."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from .operators import GUARDS, propose

LOGGERS = frozenset({"log", "_log", "logger", "warnings"})
TYPES = frozenset({"TypeVar", "cast", "NewType", "ParamSpec"})  # they are for type checkers only


class Mutation(NamedTuple):
    """One small mistake in a module.

    Attributes:
        place: the qualified name of the function or class that it is in; empty at module level.
        line: the text of its line, without indentation.
        change: what was, and what is instead.
        number: of the line, from 1.
        lines: first and last line of the statement.
        position: among the module's mutations.
    """

    place: str
    line: str
    change: str
    number: int
    lines: tuple[int, int]
    position: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it wherever its line is moved to."""
        return self.place, self.line, self.change


class _Spot(NamedTuple):
    """Where a node hangs in the tree: in a field of its parent, or in an entry of a field that is a list."""

    parent: ast.AST
    field: str
    entry: int | None
    place: str
    statement: ast.stmt

    @property
    def node(self) -> ast.AST:
        value = getattr(self.parent, self.field)
        found: ast.AST = value if self.entry is None else value[self.entry]
        return found

    def replace(self, node: ast.AST) -> None:
        if self.entry is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.entry] = node


def list_mutations(source: str) -> list[Mutation]:
    """Return all mutations of a module's source.

    Left out is what no behaviour depends on: docstrings, annotations, texts of errors, logging, assertions.
    """
    texts = source.splitlines()
    found = []
    for index, (spot, new) in enumerate(_list_changes(ast.parse(source))):
        number = getattr(spot.node, "lineno", spot.statement.lineno)
        change = f"{_show(spot.node)} -> {_show(new)}"
        line = texts[number - 1].strip()
        lines = _find_lines(spot.statement)
        found.append(Mutation(spot.place, line, change, number, lines, index))
    return found


def apply_mutation(source: str, mutation: Mutation) -> ast.Module:
    """Return the syntax tree of the mutant."""
    tree = ast.parse(source)
    spot, new = next(change for index, change in enumerate(_list_changes(tree)) if index == mutation.position)
    if isinstance(new, ast.expr | ast.stmt):
        ast.copy_location(new, spot.node)
    spot.replace(new)
    return ast.fix_missing_locations(tree)


def take_sample(mutations: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Return *count* of the mutations, the same ones for the same seed.

    Each is drawn by what it is, so a change of the module changes the sample only by what it adds and removes.
    """
    drawn = sorted(mutations, key=lambda one: hashlib.sha256(repr((seed, one.key)).encode()).digest())[:count]
    return sorted(drawn, key=lambda one: one.position)


def _list_changes(tree: ast.Module) -> Iterator[tuple[_Spot, ast.AST]]:
    for spot in _list_spots(tree, "", None):
        yield from ((spot, new) for new in propose(spot.node) if not _is_type_union(spot))


def _list_spots(parent: ast.AST, place: str, statement: ast.stmt | None) -> Iterator[_Spot]:
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "type_params") or _is_left_out(parent, field):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.expr_context | ast.JoinedStr | ast.Assert):
                within = node if isinstance(node, ast.stmt) else statement
                if within is not None and not _is_left_out_whole(node):
                    yield _Spot(parent, field, index, place, within)
                    yield from _list_spots(node, _enter(place, node), within)


def _enter(place: str, node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"{place}.{node.name}".lstrip(".")
    return place


def _is_left_out(parent: ast.AST, field: str) -> bool:
    """Return whether a field has only text for people, or guards."""
    match parent:
        case ast.Raise():
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in LOGGERS:
            return True
        case ast.keyword(arg=name) if name in GUARDS:
            return True
    return False


def _is_left_out_whole(node: ast.AST) -> bool:
    """Return whether a node is for type checkers, readers or logs."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=ast.Name(id=name)) if name in TYPES:
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in LOGGERS:
            return True
    return False


def _is_type_union(spot: _Spot) -> bool:
    """Return whether a `|` joins types, as in an alias or as the second argument of isinstance()."""
    if not (isinstance(spot.node, ast.BinOp) and isinstance(spot.node.op, ast.BitOr)):
        return False
    is_check = isinstance(spot.parent, ast.Call) and ast.unparse(spot.parent.func) == "isinstance"
    return is_check or not spot.place


def _find_lines(statement: ast.stmt) -> tuple[int, int]:
    """Return first and last line of a statement, of a compound one those of its head."""
    body = getattr(statement, "body", None)
    last = (body[0].lineno - 1 if body else statement.end_lineno) or statement.lineno
    return statement.lineno, max(last, statement.lineno)


def _show(node: ast.AST) -> str:
    match node:
        case ast.Return(value=ast.expr() as value):
            return "return None" if isinstance(value, ast.Constant) and value.value is None else "return value"
        case ast.If() | ast.While():
            return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
        case ast.comprehension():
            return ast.unparse(node).strip()
        case ast.Slice():
            return f"[{ast.unparse(node)}]"
        case ast.AugAssign():
            return ast.unparse(node)
        case ast.stmt():
            return type(node).__name__.lower()
    return " ".join(ast.unparse(node).split())
