"""Files that others may have written: read strictly, and only as much as a reader can hold; written in one piece."""

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

MAX_FILE_BYTES = 1 << 25  # a trace of 61 layers has some 2 MiB for each rank, all other files are smaller
GZIP = b"\x1f\x8b"  # the first bytes of such a file
# What a file of that size may hold: 64 bytes and more each in memory, so that a reader stays far below 1 GiB.
MAX_CONTAINERS = 1 << 20
MAX_VALUES = 1 << 21
MAX_DEPTH = 64  # of lists and objects in each other
MAX_DIGITS = 1000  # of a whole number; Python converts long ones slowly, or not at all


def read_text(path: str | os.PathLike[str], what: str, most_bytes: int = MAX_FILE_BYTES, unpacks: bool = False) -> str:
    """Return the text of a regular file.

    Args:
        path: of the file. A link to a file is followed; a FIFO or a device, which may never end, is refused.
        what: is read, for messages: `cost file`.
        most_bytes: that it may have, unpacked.
        unpacks: whether a file that gzip has packed is unpacked. No more than *most_bytes* are, whatever it holds.

    Raises:
        ConfigError: naming the file, if it cannot be read, is no regular file, too large, or not UTF-8.
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


def parse_json(
    text: str,
    most_containers: int = MAX_CONTAINERS,
    most_values: int = MAX_VALUES,
    keep: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Return what a JSON text says. Whether a number is finite, which Python allows it not to be, its reader checks.

    Args:
        text: that is parsed.
        most_containers: lists and objects that it may have.
        most_values: values that it may have.
        keep: returns what is kept of an object, inner ones first; all by default. Of large files, little is.

    Raises:
        ConfigError: if it is not JSON; if a name appears twice in one object; if a whole number has very many digits;
            if text is no Unicode; if it is deeply nested, or has more values than a reader can hold.
    """
    if text.count("{") + text.count("[") > most_containers or text.count(",") > most_values:
        raise ConfigError(f"it has more than {most_containers} lists and objects, or {most_values} values.")
    make = _refuse_duplicates if keep is None else lambda pairs: keep(_refuse_duplicates(pairs))
    try:
        content = json.loads(text, object_pairs_hook=make, parse_int=_parse_int)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair cannot be printed
    except RecursionError:
        raise ConfigError(f"it is nested more than {MAX_DEPTH} deep.") from None
    except UnicodeEncodeError:
        raise ConfigError("it has half of a surrogate pair, which is no text.") from None
    except ValueError as error:
        raise ConfigError(f"it is not JSON ({error}).") from None
    _check_depth(content)
    return content


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file; concurrent readers see either the old file or the new one.

    The draft, in the same folder, has a name that cannot be foreseen, and is made anew: no link is followed.

    Raises:
        OSError: if it cannot be written; the old file stays.
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
    """Return lines of text with escapes for what does not print as such: it may come from a file of someone else."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _quote(path: str | os.PathLike[str]) -> str:
    """Return a path as it is, unless it has characters that would not print as such."""
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
    """Raise ConfigError if lists and objects are nested more than `MAX_DEPTH` deep: what walks them may recurse."""
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
