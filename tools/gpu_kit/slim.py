"""Keep one architecture's GPU code of a CUDA library, and zero the rest, so that the library packs small.

The section `.nv_fatbin` is a row of containers, one for each source file; a container is a row of entries, each of
which is a cubin or PTX for one architecture. The CUDA runtime is given containers by address, takes the entry that fits
the GPU, and looks at no other. So entries for the architecture move to the front of their container, and the
container's size is set anew: that is what nvcc makes for this architecture alone. All else stays in its place.

A container without such an entry gets the library's smallest cubin for a foreign architecture: cuobjdump reads no
container that starts with zeros, and whether CUDA accepts an empty one is not known. Its kernels fail as on any GPU
that they were not built for ("no kernel image is available"), and only when they are called.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = ".nv_fatbin"
ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
MAGIC = b"\x50\xed\x55\xba"
HEADER_BYTES = 16  # of a container: magic, version, size of this header, size of all entries
SIZE_AT = 8  # in a container's header
ENTRY_BYTES = 32  # of an entry's header, as far as it is read here
CUBIN = 2  # the kind of an entry; 1 is PTX
ALIGNMENT = 8  # of containers and entries


class SlimError(Exception):
    """A library cannot be read, or has no code for the architecture; the message says where."""


@dataclass(frozen=True)
class Entry:
    """A cubin, or PTX, for one architecture, such as 90."""

    offset: int
    size: int  # with its header
    kind: int
    architecture: int


@dataclass(frozen=True)
class Container:
    """The GPU code of one source file; *offset* is that of its header, *size* that of all its entries."""

    offset: int
    header: int
    size: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Slimmed:
    """A library with the code of one architecture, and what was kept of it."""

    content: bytes
    containers: int
    without_code: int  # containers in which there is none for the architecture
    code_bytes: int  # of the entries that were kept


def slim(content: bytes, architecture: int = 90) -> Slimmed:
    """Return a library with the cubins of this architecture alone; one without GPU code is returned as it is.

    Raises:
        SlimError: if this is no shared library that can be read, or has GPU code, but none for the architecture.
    """
    containers = list_containers(content)
    if not containers:
        return Slimmed(content, 0, 0, 0)
    kept = [[entry for entry in each.entries if is_code_for(entry, architecture)] for each in containers]
    if not any(kept):
        others = sorted({entry.architecture for each in containers for entry in each.entries})
        raise SlimError(
            f"none of its {len(containers)} containers has a cubin for sm_{architecture}, only for {others}"
        )
    foreign = find_foreign(containers, architecture)
    slimmed = bytearray(content)
    for container, entries in zip(containers, kept, strict=True):
        entries = entries or foreign
        code = b"".join(content[entry.offset : entry.offset + entry.size] for entry in entries)
        if not 0 < len(code) <= container.size:
            raise SlimError(f"the container at byte {container.offset} has no room for a cubin of {len(code)} bytes")
        first = container.offset + container.header
        slimmed[first : first + container.size] = code + bytes(container.size - len(code))
        struct.pack_into("<Q", slimmed, container.offset + SIZE_AT, len(code))
    code_bytes = sum(entry.size for entries in kept for entry in entries)
    return Slimmed(bytes(slimmed), len(containers), sum(not entries for entries in kept), code_bytes)


def is_code_for(entry: Entry, architecture: int) -> bool:
    """Return whether an entry is a cubin that this GPU runs; sm_90a's, for one, have the number 90, too."""
    return entry.kind == CUBIN and entry.architecture == architecture


def find_foreign(containers: list[Container], architecture: int) -> list[Entry]:
    """Return the smallest cubin that a GPU of this architecture cannot run: one of another major version."""
    entries = [entry for container in containers for entry in container.entries]
    foreign = [entry for entry in entries if entry.kind == CUBIN and entry.architecture // 10 != architecture // 10]
    return sorted(foreign, key=lambda entry: (entry.size, entry.offset))[:1]


def list_containers(content: bytes) -> list[Container]:
    """Return the containers of a library's GPU code, in their order; none where it has no such code."""
    section = find_section(content, SECTION)
    return list(walk_containers(content, *section)) if section else []


def walk_containers(content: bytes, offset: int, size: int) -> Iterator[Container]:
    """Yield the containers in a section; what is between them is zeros."""
    end = offset + size
    while offset < end:
        if content[offset : offset + 4] != MAGIC:
            aligned = min(offset + ALIGNMENT - offset % ALIGNMENT, end)
            if any(content[offset:aligned]):
                raise SlimError(f"{SECTION} has neither a container nor padding at byte {offset}")
            offset = aligned
            continue
        header, length = read("<HQ", content, offset + 6, end)
        first = offset + header
        if header < HEADER_BYTES or first + length > end:
            raise SlimError(f"the container at byte {offset} ends outside of {SECTION}")
        yield Container(offset, header, length, tuple(walk_entries(content, first, first + length)))
        offset = first + length


def walk_entries(content: bytes, offset: int, end: int) -> Iterator[Entry]:
    """Yield the entries of a container."""
    while offset < end:
        kind, _, header, payload = read("<HHIQ", content, offset, end)
        (architecture,) = read("<I", content, offset + 28, end)
        if header < ENTRY_BYTES or offset + header + payload > end:
            raise SlimError(f"the entry at byte {offset} ends outside of its container")
        yield Entry(offset, header + payload, kind, architecture)
        offset += header + payload


def find_section(content: bytes, name: str) -> tuple[int, int] | None:
    """Return offset and size of an ELF file's section of that name, if it has one."""
    if not content.startswith(ELF):
        raise SlimError("this is no ELF file of 64 bits, little-endian")
    (table,) = read("<Q", content, 0x28, len(content))
    size, count, names = read("<HHH", content, 0x3A, len(content))
    headers = [read("<IIQQQQ", content, table + i * size, len(content)) for i in range(count)]
    if names >= count:
        raise SlimError("its sections have no names")
    wanted = name.encode() + b"\0"
    for header in headers:
        if content.startswith(wanted, headers[names][4] + header[0]):
            if header[4] + header[5] > len(content):
                raise SlimError(f"{name} ends outside of the file")
            return header[4], header[5]
    return None


def read(form: str, content: bytes, offset: int, end: int) -> tuple[int, ...]:
    """Return numbers at an offset, which must be before the *end*."""
    if offset + struct.calcsize(form) > end:
        raise SlimError(f"something ends at byte {end} in the middle of a header")
    return struct.unpack_from(form, content, offset)
