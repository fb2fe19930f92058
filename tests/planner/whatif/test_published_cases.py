"""The published cases: their files, and digests that no renaming may change."""

from __future__ import annotations

from dbo_runtime.planner.whatif.published_cases import list_cases

DIGESTS = {
    "a3-layer-4894": "11241eb1c34510a2",
    "910b-profile-4894": "56c4607387b383db",
    "910b-share-5591": "c71b13965eb9d772",
    "910c-share-5591": "1308d869f830ab1f",
    "r1-tp16-941": "121afa5bd4a4897b",
    "r1-decode-910b": "55cf3f456bf68778",
    "r1-decode-910c": "f5c306e1b954ccbe",
}


def test_digests_stay_what_they_were() -> None:
    assert {case.name: case.table.digest for case in list_cases()} == DIGESTS
