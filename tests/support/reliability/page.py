"""The page docs/reliability.md, whose sections commands write; see `tests.support.page`."""

from __future__ import annotations

from tests.support.page import ROOT

PAGE = ROOT / "docs" / "reliability.md"
