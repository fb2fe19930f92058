"""Files of others are read strictly, and own ones written in one piece."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dbo_runtime.errors import ConfigError
from dbo_runtime.outside_files import MAX_DEPTH, MAX_FILE_BYTES, make_printable, parse_json, read_text, write_text


def test_a_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("µ")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link", "trace") == "µ"


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=r"^trace .*fifo cannot be read: it is no regular file"):
        read_text(tmp_path / "fifo", "trace")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse
    with pytest.raises(ConfigError, match="more than 32 MiB"):
        read_text(tmp_path / "file", "trace")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": 2, "a": 3}', r"^a appears twice"),
        ('{"a": {"\\u001b": 1, "\\u001b": 3}}', r"^'\\x1b' appears twice"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
        ('{"a":' * 100_000, "nested more than 64 deep"),
        ('["\\ud800"]', "half of a surrogate pair"),
        ("9" * 5000, "5000 digits"),
        ("[1,", "not JSON"),
        ("[" + "[]," * (1 << 20) + "[]]", "lists and objects"),
        ("[" + "1," * ((1 << 21) + 1) + "1]", "values"),
    ],
)
def test_what_readers_cannot_hold_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_json(text)


def test_what_is_allowed_is_read() -> None:
    text = "[" * MAX_DEPTH + '1, 1.5, true, null, "\\ud83d\\ude00"' + "]" * MAX_DEPTH
    found = parse_json(text)
    for _ in range(MAX_DEPTH - 1):
        (found,) = found
    assert found == [1, 1.5, True, None, "\U0001f600"]


def test_a_draft_follows_no_link_and_leaves_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    (tmp_path / "file").symlink_to(secret)
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "new")
    finally:
        os.umask(before)
    assert (secret.read_text(), (tmp_path / "file").read_text()) == ("kept", "new")
    assert not (tmp_path / "file").is_symlink()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(OSError, match="directory"):
        write_text(tmp_path, "new")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_message_cannot_steer_a_terminal() -> None:
    assert make_printable("a\x1b[31m\nµ\ud800") == "a\\x1b[31m\nµ\\ud800"
