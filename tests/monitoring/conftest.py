"""What is exported, for all tests here."""

from __future__ import annotations

import pytest

from tests.support.monitoring.exported import Family, count_everything, read_families


@pytest.fixture(scope="session")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what a Prometheus server reads after one of everything was counted."""
    return count_everything(tmp_path_factory.mktemp("counts"))


@pytest.fixture(scope="session")
def families(exposition: str) -> dict[str, Family]:
    """Return the metrics that are exported, by name."""
    return read_families(exposition)


@pytest.fixture(scope="session")
def samples(families: dict[str, Family]) -> dict[str, dict[str, set[str]]]:
    """Return the values of each label, by the name of a sample."""
    return {name: labels for family in families.values() for name, labels in family.samples.items()}
