"""The page docs/reliability.md, whose sections commands write; see `tests.benchmarks.page`."""

from __future__ import annotations

from tests.benchmarks.page import ROOT

PAGE = ROOT / "docs" / "reliability.md"
