"""Invalid inputs: valid ones with something odd in them, raw bytes, and odd things instead of files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

MIB = 1 << 20
HUGE = "a number of 100,000 digits"  # stands for itself in JSON that is not text yet; `dump` replaces it
DEEP = "100,000 lists in each other"
LONE = "half a pair of surrogates"
_RAW = {
    f'"{HUGE}"': "9" * 100_000,
    f'"{DEEP}"': "[" * 100_000 + "]" * 100_000,
    f'"{LONE}"': r'"\ud800"',
}

ODD_NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, -1, 0, 2, 10**6, 1 << 63, 10**400, 0.5)
ODD_TEXTS = ("", "x" * 3000, "../../../tmp/out", "/etc/passwd", "a\0b", "\x1b[31m", "µ", "$\\frac{", "%s{0}", LONE)
ODD_VALUES = (*ODD_NUMBERS, *ODD_TEXTS, True, False, None, [], {}, [[]], {"": 0}, [None] * 50, HUGE, DEEP)


def change(content: Any, chance: Random) -> Any:
    """Return JSON data of which one to three things are changed."""
    changed = {"": copy.deepcopy(content)}
    for number in range(chance.randint(1, 3)):
        node, key = chance.choice(_list_places(changed))
        _change_place(node, key, chance, 3 if number else 100)  # lists of lists that are repeated fill the memory here
    return changed[""]


def _list_places(root: dict[str, Any]) -> list[tuple[Any, Any]]:
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        items = list(node.items() if isinstance(node, dict) else enumerate(node))
        places += [(node, key) for key, _ in items]
        todo += [item for _, item in items if isinstance(item, (dict, list))]
    return places


def _change_place(node: Any, key: Any, chance: Random, most: int) -> None:
    value = node[key]
    what = chance.randrange(8)
    if what == 0 and key != "":
        del node[key]
    elif what == 1 and isinstance(node, dict) and key != "":
        node[chance.choice(ODD_TEXTS)] = node.pop(key)
    elif what == 2 and isinstance(value, list):
        node[key] = value * chance.choice((2, most))
    elif what == 3:
        node[key] = [value]
    elif what == 4 and isinstance(value, (int, float)) and abs(value) < 1 << 63:
        factor = chance.choice((-1, 2, 1e-9, 1e9))
        with suppress(OverflowError):  # a whole number that no float can hold stays as it is
            node[key] = value * factor
    else:
        node[key] = copy.deepcopy(chance.choice(ODD_VALUES))  # a later change may be to what is in it


def dump(content: Any) -> str:
    """Return JSON as text, with the values that only text can have."""
    text = json.dumps(content)
    for stands, raw in _RAW.items():
        text = text.replace(stands, raw)
    return text


def spoil(text: bytes, chance: Random) -> bytes:
    """Return bytes of which a few are changed, cut off, repeated or put in."""
    position, length = chance.randrange(len(text) + 1), chance.choice((1, 2, 8, 100))
    what = chance.randrange(6)
    if what == 0:
        return text[:position]
    if what == 1:
        return text[:position] + chance.randbytes(length) + text[position:]
    if what == 2:
        return text[:position] + text[position + length :]
    if what == 3:
        return text[:position] + text[position : position + length] * chance.choice((2, 50)) + text[position:]
    if what == 4:
        return chance.choice((b"\xef\xbb\xbf", b"\0", b"\xff\xfe")) + text
    return text[:position] + chance.choice((b'"', b"{", b"]", b"\\", b",", b"NaN", b"1e999")) + text[position + 1 :]


def make_json(valid: Sequence[Any], chance: Random) -> bytes:
    """Return the bytes of a file that should be JSON, most often almost valid."""
    kind = chance.randrange(10)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    content = chance.choice(valid)
    text = dump(content if kind == 1 else change(content, chance)).encode("utf-8", "surrogatepass")
    if kind == 2:
        name, separator, rest = text.partition(b'": ')
        text = name + separator + b"0, " + name.rpartition(b"{")[2] + separator + rest  # a name twice
    return spoil(text, chance) if kind in (1, 3, 4) else text


def make_text(valid: Sequence[str], chance: Random) -> bytes:
    """Return the bytes of a file that should be lines of words, most often almost valid."""
    lines = chance.choice(valid).splitlines()
    for _ in range(chance.randint(0, 2)):
        number = chance.randrange(len(lines))
        lines[number] = change_words(lines[number], lines, chance)
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return spoil(text, chance) if chance.random() < 0.3 else text


def change_words(line: str, lines: Sequence[str], chance: Random) -> str:
    """Return a line of which one word is another line's, odd, missing or repeated."""
    words = line.split() or [""]
    number = chance.randrange(len(words))
    others = [
        *(chance.choice(lines).split() or [""]),
        "-1",
        "9" * 5000,
        "%-1/-1",
        "%0/9",
        "\ud800",
        "wait",
        "free",
        "*",
    ]
    words[number : number + 1] = chance.choice(([], [chance.choice(others)], [words[number]] * 2))
    return chance.choice((" ".join(words), f"{line}\n{line}", line[: chance.randrange(len(line) + 1)]))


def list_large(valid: Any) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the names of large files, and what makes each."""
    distinct = ",".join(f'"{number:x}":1' for number in range(2_000_000))
    yield "100 MB of blanks", lambda: b" " * 100 * MIB + dump(valid).encode()
    yield "100 MB of a list", lambda: b"[" + b"1," * 50 * MIB + b"1]"
    yield "as many objects as fit", lambda: b"[" + b"{}," * 10 * MIB + b"{}]"
    yield "1 million objects", lambda: b"[" + b"{}," * (MIB - 10) + b"{}]"
    yield "2 million names", lambda: ("{" + distinct + "}").encode()
    yield "2 million names after wide text", lambda: ('{"\U0001f600": 0,' + distinct + "}").encode()
    yield "30 MiB of text", lambda: b'{"format": "' + b"x" * 30 * MIB + b'"}'
    yield "100,000 lists in each other", lambda: b"[" * 100_000
    yield "1,000 objects in each other", lambda: b'{"a":' * 1_000 + b"1" + b"}" * 1_000
    yield "a number of 1,000,000 digits", lambda: b'{"format": ' + b"9" * 1_000_000 + b"}"


def place_oddly(folder: Path) -> Mapping[str, str]:
    """Make what is no file where a file should be; return the paths by name."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "zero").symlink_to("/dev/zero")
    names = ("folder", "fifo", "dangling", "loop", "zero", "missing", "fifo/below")
    return {
        **{name: str(folder / name) for name in names},
        "a NUL byte": f"{folder}/a\0b",
        "a long name": str(folder / ("x" * 5000)),
        "no name": "",
        "a lone surrogate": f"{folder}/\ud800",
    }
