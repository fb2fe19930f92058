"""All reasons to decline, with what they mean and what to do; docs/troubleshooting.md has them as tables."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from dbo_runtime.lab.doctor.ascend_remedies import ASCEND_REMEDIES
from dbo_runtime.lab.doctor.loading_remedies import LOADING_REMEDIES
from dbo_runtime.lab.doctor.remedy import Remedy
from dbo_runtime.lab.doctor.step_remedies import ENCODER_REMEDIES, PART_REMEDIES, STEP_REMEDIES

REMEDIES: Mapping[str, tuple[Remedy, ...]] = MappingProxyType(
    {
        "loading": LOADING_REMEDIES,
        "ascend": ASCEND_REMEDIES,
        "steps": STEP_REMEDIES,
        "encoders": ENCODER_REMEDIES,
        "parts": PART_REMEDIES,
    }
)
"""Remedies, by where a reason is found."""


def find_remedies(reason: str) -> list[Remedy]:
    """Return the remedies of a reason, which may have its detail in brackets behind it; one if it is known."""
    remedies = (remedy for group in REMEDIES.values() for remedy in group)
    return [remedy for remedy in remedies if any(is_one_of(reason, phrase) for phrase in remedy.reasons)]


def is_one_of(reason: str, phrase: str) -> bool:
    """Return whether a reason is a phrase, in which `*` is what varies, or that phrase with a detail."""
    pattern = phrase.replace("[", "[[]")  # a bracket is only itself
    return fnmatchcase(reason, pattern) or fnmatchcase(reason, f"{pattern} (*)")
