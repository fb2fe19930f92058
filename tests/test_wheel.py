"""The wheel that pip builds has all that is imported, and nothing of the checkout is needed to run it."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

import dbo_runtime

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


def test_every_package_is_imported_from_the_wheel(site: Path) -> None:
    modules = pkgutil.walk_packages([str(ROOT / "dbo_runtime")], "dbo_runtime.")
    packages = ["dbo_runtime", "dbo_models", *(module.name for module in modules if module.ispkg)]
    assert "dbo_runtime.vllm_plugin.step" in packages
    files = "".join(f"print({name}.__file__); " for name in packages)
    done = run(site, "-c", f"import {', '.join(packages)}; {files}")
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(site) for file in done.stdout.split())


def test_the_wheel_plans_a_published_case(site: Path) -> None:
    done = run(
        site, "-m", "dbo_runtime", "plan", "--costs", "r1-tp16-941", "--policy", "alternate", "--micro-batches", "2"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "costs: r1-tp16-941, modelled" in done.stdout
