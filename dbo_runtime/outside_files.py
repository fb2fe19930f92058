"""Files that others may have written. Reading is strict and bounded in memory; writing is atomic."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from dbo_runtime.errors import ConfigError
from dbo_runtime.nearest import find_nearest

MAX_FILE_BYTES = 1 << 25  # a trace of 61 layers has about 2 MiB per rank; all other files are smaller
GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
# Limits within a file of that size: each entry takes 64 bytes or more in memory, and a reader must stay far below 1
# GiB.
MAX_CONTAINERS = 1 << 20
MAX_VALUES = 1 << 21
MAX_DEPTH = 64  # nesting of lists and objects
MAX_DIGITS = 1000  # digits of a whole number; Python converts long ones slowly, or not at all


def read_text(path: str | os.PathLike[str], what: str, most_bytes: int = MAX_FILE_BYTES, unpacks: bool = False) -> str:
    """Return the text of a regular file.

    Args:
        path: path of the file. Links are followed. A FIFO or a device is refused, because it may never end.
        what: kind of file for messages, such as `cost file`.
        most_bytes: size limit, unpacked.
        unpacks: whether to unpack a gzip file. It is unpacked up to *most_bytes*, whatever its size.

    Raises:
        ConfigError: the file cannot be read, is not regular, is too large, or is not UTF-8. The message names it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{what} {_quote(path)} cannot be read: it is no regular file.")
            is_packed = unpacks and file.read(len(GZIP)) == GZIP
            file.seek(0)
            source = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if is_packed else file
            content = source.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ConfigError(f"{what} {_quote(path)} cannot be read: it has more than {most_bytes >> 20} MiB.")
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {_quote(path)} cannot be read: it is not text.") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:  # a ValueError if the path has a NUL byte
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what} {_quote(path)} cannot be read: {why}.") from None


def suggest_folder(path: str | os.PathLike[str]) -> str | None:
    """Return the folder next to *path* whose name is most like it; None if there is none."""
    named = Path(path)
    try:
        names = [entry.name for entry in named.parent.iterdir() if entry.is_dir()]
    except (OSError, ValueError):  # a ValueError if the path has a NUL byte
        return None
    close = find_nearest(named.name, names)
    return None if close is None else str(named.with_name(close))


def check_model(model: str) -> None:
    """Raise ConfigError if *model* is a misspelt path: its folder exists, and holds one with nearly this name.

    vLLM takes it for a name on a hub, and tries for minutes to reach that.
    """
    close = suggest_folder(model) if os.sep in model and not os.path.exists(model) else None
    if close is not None:
        raise ConfigError(f"there is no folder {_quote(model)}; did you mean {close}?")


def parse_json(
    text: str,
    most_containers: int = MAX_CONTAINERS,
    most_values: int = MAX_VALUES,
    keep: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Return the content of a JSON text. Python accepts numbers that are not finite, so the caller must check those.

    Args:
        text: the JSON text.
        most_containers: limit for lists and objects.
        most_values: limit for values.
        keep: function that reduces an object to the part to keep, called for inner objects first. By default all is
            kept; readers of large files keep little.

    Raises:
        ConfigError: the text is not JSON or not Unicode, repeats a name in one object, has a whole number with very
            many digits, is deeply nested, or has more values than the limits.
    """
    if text.count("{") + text.count("[") > most_containers or text.count(",") > most_values:
        raise ConfigError(f"it has more than {most_containers} lists and objects, or {most_values} values.")
    make = _refuse_duplicates if keep is None else lambda pairs: keep(_refuse_duplicates(pairs))
    try:
        content = json.loads(text, object_pairs_hook=make, parse_int=_parse_int)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError:
        raise ConfigError(f"it is nested more than {MAX_DEPTH} deep.") from None
    except UnicodeEncodeError:
        raise ConfigError("it has half of a surrogate pair, which is no text.") from None
    except ValueError as error:
        raise ConfigError(f"it is not JSON ({error}).") from None
    _check_depth(content)
    return content


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically: concurrent readers see either the old file or the new one.

    The draft is in the same folder, is always a new file, and has an unpredictable name, so no link is followed.

    Raises:
        OSError: the file cannot be written. The old file stays.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def make_printable(text: str) -> str:
    """Return text with unprintable characters escaped: it may come from someone else's file."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _quote(path: str | os.PathLike[str]) -> str:
    """Return a path unchanged, or quoted if it has unprintable characters."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ConfigError(f"{_quote(twice[:100])} appears twice in one object.")
    return content


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ConfigError(f"a whole number has {len(digits)} digits, more than {MAX_DIGITS}.")
    return int(digits)


def _check_depth(content: Any) -> None:
    """Raise ConfigError if lists and objects are nested more than `MAX_DEPTH` deep, because later code may recurse."""
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if type(node) is dict else node if type(node) is list else ())
            if type(item) in (dict, list)
        ]
        if not level:
            return
    raise ConfigError(f"it is nested more than {MAX_DEPTH} deep.")
