"""The adapter's program equals the model's forward, unsplit and cut at every token; and a mistake in it is detected."""

from __future__ import annotations

from pathlib import Path

import granite_adapter
import pytest
from granite_adapter import GraniteAdapter

from dbo_runtime.testing import verify_adapter

MODEL = str(Path(__file__).parent)  # where config.json is; weights are random


def test_the_program_is_the_models_own_forward_at_every_cut() -> None:
    verification = verify_adapter(MODEL, GraniteAdapter())
    assert not verification.mismatches, str(verification)
    assert verification.cuts > 10


def test_a_mistake_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granite_adapter, "add_scaled", lambda factor, residual, x: residual + x)
    assert verify_adapter(MODEL, GraniteAdapter()).mismatches[0].op == "L0.attn_add"
