"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# CI draws the same examples each time, so that what it says is about the change; runs by hand go on searching.
settings.register_profile("dbo", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("dbo")
