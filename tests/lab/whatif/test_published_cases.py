"""The published cases: their files, what tools derive, and digests that no renaming may change."""

from __future__ import annotations

import importlib

import pytest

from dbo_runtime.lab.whatif.published_cases import get_case, list_cases

DIGESTS = {
    "a3-layer-4894": "11241eb1c34510a2",
    "910b-profile-4894": "56c4607387b383db",
    "910b-share-5591": "c71b13965eb9d772",
    "910c-share-5591": "1308d869f830ab1f",
    "r1-tp16-941": "121afa5bd4a4897b",
    "r1-decode-910b": "55cf3f456bf68778",
    "r1-decode-910c": "f5c306e1b954ccbe",
    "r1-ep16-1589": "1658b2f8dc7d1c95",
    "qwen3-tp4-44677": "521b5af1a07bc3c5",
    "r1-decode-12708": "e6175b9596b96695",
    "qwen36-tp4-56126": "4a3d8608ac9951d5",
    "qwen3-235b-decode-h800": "79af193346c278cd",
    "qwen3-235b-prefill-h800": "59d430d8d9ddf6ae",
    "qwen3-235b-910c": "509726a91540e265",
    "qwen3-235b-910b": "f3ad6f2036ca2ae4",
    "r1-decode-h800": "826b2d64abdffbdc",
    "r1-prefill-h800": "88cd22d83006a483",
    "r1-prefill-910c": "eeb223d602d303bd",
    "r1-prefill-910b": "2012e3bdd67a064c",
    "llama70b-tp8-11329": "02aea8cf908a3fcc",
}


def test_digests_stay_what_they_were() -> None:
    assert {case.name: case.table.digest for case in list_cases()} == DIGESTS


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("decode_cases", {"r1-decode-910b", "r1-decode-910c", "r1-decode-12708"}),
        ("measured_cases", {"r1-ep16-1589", "qwen3-tp4-44677", "qwen36-tp4-56126", "llama70b-tp8-11329"}),
        (
            "scale_cases",
            {
                *(f"r1-prefill-{chip}" for chip in ("910b", "910c", "h800")),
                "r1-decode-h800",
                *(f"qwen3-235b-{chip}" for chip in ("910b", "910c", "prefill-h800", "decode-h800")),
            },
        ),
    ],
)
def test_the_files_are_what_is_derived(module: str, names: set[str]) -> None:
    derived = importlib.import_module(f"dbo_runtime.lab.whatif.derived.{module}").derive_tables()
    assert derived.keys() == names
    for name, table in derived.items():
        assert get_case(name).table == table
