"""Libraries of tiny fat binaries: what is for one architecture stays bit for bit, all else of the GPU code is gone."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import profiles
from tests.support.gpu_kit.fat_binaries import (
    CONTAINER_HEADER_BYTES,
    CUBIN,
    PTX,
    Code,
    Source,
    encode_sources,
    find_content,
    make_library,
)
from tools.gpu_kit.slim import SECTION, SlimError, slim

HOPPER = Code(CUBIN, 90, b"hopper's".ljust(48, b"\x01"))
AMPERE = Code(CUBIN, 80, b"ampere's".ljust(24, b"\x02"))
OTHERS = (b"text of the host".ljust(104, b"\x03"), b"data of the host".ljust(56, b"\x04"))

codes = st.builds(
    Code,
    kind=st.sampled_from((CUBIN, PTX)),
    architecture=st.sampled_from((75, 80, 89, 90, 100, 120)),
    payload=st.binary(min_size=8, max_size=64).map(lambda payload: payload + bytes(-len(payload) % 8)),
    header_bytes=st.sampled_from((64, 80, 112)),
)
sources = st.lists(
    st.builds(
        Source,
        codes=st.lists(codes, min_size=1, max_size=4).map(tuple),
        padding=st.sampled_from((0, 0, 8, 24)),
    ),
    min_size=1,
    max_size=5,
)


def make(*files: Source) -> bytes:
    """Return a library with these containers, between sections of the host's."""
    return make_library([(".text", OTHERS[0]), (SECTION, encode_sources(files)), (".data", OTHERS[1])])


def expect(files: list[Source]) -> list[bytes] | None:
    """Return what each container should have; None if the library should be refused."""
    own = [[code for code in file.codes if (code.kind, code.architecture) == (CUBIN, 90)] for file in files]
    foreign = [c.encode() for file in files for c in file.codes if c.kind == CUBIN and c.architecture != 90]
    smallest = min(foreign, key=len, default=b"")
    expected = [b"".join(code.encode() for code in codes) or smallest for codes in own]
    fit = all(
        0 < len(code) <= sum(len(code.encode()) for code in file.codes)
        for code, file in zip(expected, files, strict=True)
    )
    return expected if any(own) and fit else None


@settings(max_examples=profiles.scale(200))
@given(sources)
def test_code_for_one_architecture_survives_bit_for_bit_and_nothing_else_of_the_gpu_code_does(
    files: list[Source],
) -> None:
    library, expected = make(*files), expect(files)
    if expected is None:
        with pytest.raises(SlimError):
            slim(library)
        return
    slimmed = slim(library).content
    fat = encode_sources(files)
    start = find_content(library, fat)
    assert len(slimmed) == len(library)
    assert slimmed[:start] == library[:start]
    assert slimmed[start + len(fat) :] == library[start + len(fat) :]
    for file, code in zip(files, expected, strict=True):
        whole = file.encode()
        first = start + CONTAINER_HEADER_BYTES
        assert slimmed[start : start + 8] == whole[:8]
        assert struct.unpack_from("<Q", slimmed, start + 8) == (len(code),)
        assert slimmed[first : first + len(code)] == code
        end = start + len(whole) + file.padding
        assert not any(slimmed[first + len(code) : end])
        start = end


@given(sources)
def test_a_slimmed_library_stays_as_it_is(files: list[Source]) -> None:
    library = make(Source((HOPPER, AMPERE)), *(Source((*file.codes, AMPERE)) for file in files))
    once = slim(library)
    twice = slim(once.content)
    assert twice == once
    assert once.containers == 1 + len(files)


def test_what_was_kept_is_counted() -> None:
    found = slim(make(Source((AMPERE, HOPPER)), Source((AMPERE,)), Source((HOPPER, AMPERE, HOPPER))))
    assert (found.containers, found.without_code, found.code_bytes) == (3, 1, 3 * len(HOPPER.encode()))


def test_the_code_of_another_architecture_can_be_kept() -> None:
    found = slim(make(Source((AMPERE, HOPPER))), 80)
    assert AMPERE.payload in found.content
    assert HOPPER.payload not in found.content


def test_a_cubin_of_the_same_major_version_takes_no_place_that_is_empty() -> None:
    """A GPU of sm_89 runs cubins of sm_80: kernels of an empty container must fail there, not run something else."""
    small = Code(CUBIN, 80, bytes(8))
    with pytest.raises(SlimError, match="no room for a cubin of 0 bytes"):
        slim(make(Source((Code(CUBIN, 89, bytes(16)),)), Source((small,))), 89)


def test_a_library_without_gpu_code_is_left_as_it_is() -> None:
    library = make_library([(".text", OTHERS[0])])
    assert slim(library).content == library
    assert slim(make()).content == make()


FAT = encode_sources([Source((AMPERE, HOPPER)), Source((HOPPER,))])


def damage(at: int, value: bytes) -> bytes:
    """Return a library whose section is changed at an offset."""
    return make_library([(SECTION, FAT[:at] + value + FAT[at + len(value) :])])


WRONG = {
    "no file": (b"", "no ELF file"),
    "a script": (b"#!/bin/sh\necho no library\n", "no ELF file"),
    "an ELF file of 32 bits": (b"\x7fELF\x01\x01".ljust(64, b"\0"), "no ELF file of 64 bits"),
    "a header that is cut off": (make(Source((HOPPER,)))[:48], "ends at byte 48 in the middle of a header"),
    "sections that are cut off": (make(Source((HOPPER,)))[:-40], "in the middle of a header"),
    "no code for sm_90": (make(Source((AMPERE,))), r"none of its 1 containers has a cubin for sm_90, only for \[80\]"),
    "PTX for sm_90 only": (make(Source((AMPERE, Code(PTX, 90, bytes(8))))), r"only for \[80, 90\]"),
    "no room": (
        make(Source((HOPPER, AMPERE)), Source((Code(PTX, 80, bytes(8)),))),
        "has no room for a cubin of 88 bytes",
    ),
    "no magic": (damage(0, b"what"), "neither a container nor padding at byte 64"),
    "a container without an end": (damage(8, b"\xff\xff\xff"), f"the container at byte 64 ends outside of {SECTION}"),
    "a container without a header": (damage(6, b"\0\0"), "the container at byte 64 ends outside of"),
    "an entry without an end": (damage(16 + 8, b"\xff\xff"), "the entry at byte 80 ends outside of its container"),
    "an entry without a header": (damage(16 + 4, b"\0\0"), "the entry at byte 80 ends outside of its container"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_or_used_is_refused_with_the_place(name: str) -> None:
    library, message = WRONG[name]
    with pytest.raises(SlimError, match=message):
        slim(library)


@settings(max_examples=profiles.scale(300))
@given(st.data())
def test_no_damage_has_another_outcome_than_a_library_of_the_same_size_or_a_refusal(data: st.DataObject) -> None:
    library = bytearray(make(Source((AMPERE, HOPPER), 8), Source((AMPERE,))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(library) - 1))
        library[at] = data.draw(st.integers(0, 255))
    cut = bytes(library[: data.draw(st.sampled_from((len(library), len(library) // 2, 70)))])
    with suppress(SlimError):
        assert len(slim(cut).content) == len(cut)
