"""How many examples property tests draw: a part of them in CI, fewer by hand, all of them and more at night.

`HYPOTHESIS_PROFILE=nightly` chooses a profile; without it, CI has `ci` and other runs have `local`.
"""

from __future__ import annotations

import os

from hypothesis import settings

FULL = 100  # examples of a test that asks for no number, in a profile in which each test draws what it asks for
PROFILES = {"ci": 20, "local": 10, "nightly": 2 * FULL}


def load() -> None:
    """Register the profiles, and load the one that the environment chooses."""
    for name, examples in PROFILES.items():
        # CI draws the same examples each time, so that its outcome depends on the change only; others go on searching.
        settings.register_profile(name, deadline=None, print_blob=True, max_examples=examples, derandomize=name == "ci")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "local"))


def scale(examples: int) -> int:
    """Return how many examples the loaded profile draws where a test asks for this many: its part, but not too few.

    That is, no fewer than for a test that asks for no number.
    """
    return max(examples * settings().max_examples // FULL, min(examples, settings().max_examples))
