"""Tiny ELF files with CUDA's fat binaries, as nvcc lays them out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

PTX, CUBIN = 1, 2
ELF_HEADER_BYTES, SECTION_HEADER_BYTES, CONTAINER_HEADER_BYTES = 64, 64, 16


@dataclass(frozen=True)
class Code:
    """An entry: its header, of which the first 32 bytes are made from the other fields, and its payload."""

    kind: int
    architecture: int
    payload: bytes
    header_bytes: int = 64

    def encode(self) -> bytes:
        header = struct.pack("<HHIQ", self.kind, 0x101, self.header_bytes, len(self.payload))
        header += struct.pack("<IIHHI", 0, 64, 0, 1, self.architecture)
        return header + bytes([0xAB]) * (self.header_bytes - len(header)) + self.payload


@dataclass(frozen=True)
class Source:
    """A container: what nvcc has made of one source file, and how many bytes of padding follow it."""

    codes: tuple[Code, ...]
    padding: int = 0

    def encode(self) -> bytes:
        body = b"".join(code.encode() for code in self.codes)
        return b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, CONTAINER_HEADER_BYTES, len(body)) + body


def encode_sources(sources: Sequence[Source]) -> bytes:
    """Return the section `.nv_fatbin`."""
    return b"".join(source.encode() + bytes(source.padding) for source in sources)


def make_library(sections: Sequence[tuple[str, bytes]]) -> bytes:
    """Return an ELF file with these sections, in their order, each at a multiple of 16."""
    names, name_offsets = b"\0", []
    for name, _ in (*sections, (".shstrtab", b"")):
        name_offsets.append(len(names))
        names += name.encode() + b"\0"
    body, headers = b"", [bytes(SECTION_HEADER_BYTES)]
    for offset, (_, content) in zip(name_offsets, (*sections, (".shstrtab", names)), strict=True):
        body += bytes(-len(body) % 16)
        place = ELF_HEADER_BYTES + len(body)
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, place, len(content), 0, 0, 16, 0))
        body += content
    body += bytes(-len(body) % 16)
    table = ELF_HEADER_BYTES + len(body)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQ", 3, 62, 1, 0, 0, table)
    counts = (ELF_HEADER_BYTES, 0, 0, SECTION_HEADER_BYTES, len(headers), len(headers) - 1)
    return header + struct.pack("<IHHHHHH", 0, *counts) + body + b"".join(headers)


def find_content(library: bytes, content: bytes) -> int:
    """Return where a section's content is in a library, which must have it once."""
    assert library.count(content) == 1
    return library.index(content)
