"""Python expressions for recorded calls, to write a draft's source with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dbo_runtime.lab.verify.draft.calls import FUNCTION, Call, Literal, Named, Unknown, list_items

OPERATORS: Mapping[str, str] = {
    "add": "{0} + {1}",
    "__add__": "{0} + {1}",
    "__radd__": "{1} + {0}",
    "sub": "{0} - {1}",
    "__sub__": "{0} - {1}",
    "__rsub__": "{1} - {0}",
    "mul": "{0} * {1}",
    "__mul__": "{0} * {1}",
    "__rmul__": "{1} * {0}",
    "div": "{0} / {1}",
    "__truediv__": "{0} / {1}",
    "matmul": "{0} @ {1}",
    "__matmul__": "{0} @ {1}",
    "neg": "-{0}",
    "__getitem__": "{0}[{1}]",
}
"""Methods of tensors that are written as operators. In-place forms (`add_`, `__iadd__`) are written the same way."""

WORDS: Mapping[str, str] = {"__getitem__": "select", "__rsub__": "subtract", "sub": "subtract", "div": "divide"}


def format_item(item: Any, names: Callable[[Any], str]) -> str:
    """Return an argument as an expression. *names* has the names of tensors, paths and token counts."""
    if type(item) in (tuple, list):
        listed = ", ".join(format_item(part, names) for part in item)
        return f"({listed},)" if len(item) == 1 else f"({listed})"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{name!r}: {format_item(part, names)}" for name, part in item.items()) + "}"
    if isinstance(item, slice):
        start, stop, step = (
            "" if part is None else format_item(part, names) for part in (item.start, item.stop, item.step)
        )
        return f"{start}:{stop}" + (f":{step}" if step else "")
    if isinstance(item, Literal):
        return item.text
    if item is ...:
        return "..."
    if isinstance(item, Named):
        return names(item)
    return repr(item)


def format_function(call: Call, names: Callable[[Any], str]) -> str:
    """Return a function call as an expression that is not in place."""
    target = str(call.target)
    is_method = target.startswith("torch.Tensor.")
    name = get_name(call)
    args = [format_item(item, names) for item in call.args]
    if is_method and name in OPERATORS and not call.kwargs and len(args) <= 2:
        if name == "__getitem__" and isinstance(call.args[1], tuple) and len(call.args[1]) > 1:
            args[1] = args[1][1:-1]
        return OPERATORS[name].format(*args)
    if is_method and target.endswith(".__get__"):
        return f"{args[0]}.{target.split('.')[-2]}"
    args += [f"{key}={format_item(item, names)}" for key, item in call.kwargs]
    if is_method:
        return f"{args[0]}.{name}({', '.join(args[1:])})"
    return f"{target}({', '.join(args)})"


def get_name(call: Call) -> str:
    """Return the last part of a function's name, without the marks of in-place variants."""
    name = str(call.target).rpartition(".")[2]
    if name.startswith("__i") and name.endswith("__") and f"__{name[3:]}" in OPERATORS:
        return f"__{name[3:]}"
    return name.rstrip("_") if is_in_place(name) else name


def is_in_place(target: str) -> bool:
    """Return whether a function changes its first argument. It is written as one that does not."""
    name = target.rpartition(".")[2]
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def get_word(call: Call) -> str:
    """Return a word for the effect of a function, to name an op with."""
    name = get_name(call)
    word = WORDS.get(name, name.strip("_"))
    if word == "get":
        word = str(call.target).split(".")[-2]
    return word if word.isidentifier() else "compute"


def find_unknown(call: Call) -> str | None:
    """Return the unknown part of a call's arguments, or the reason why no expression can replace the call."""
    unknown = next((item for item in list_items((call.args, call.kwargs)) if isinstance(item, Unknown)), None)
    if unknown is not None:
        return f"{call.target} takes {unknown.what}"
    name = str(call.target)
    if "__setitem__" in name:
        return f"{name} changes a part of a tensor"
    if call.kind == FUNCTION and not (
        name.startswith("torch.") and all(part.isidentifier() for part in name.split("."))
    ):
        return f"{name} is no function of torch"
    return None
