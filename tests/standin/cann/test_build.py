"""How the stand-in's libraries come to be."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.standin.cann import build
from tests.support.latch import Latch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "find_digest", lambda: "digest")
    return tmp_path / "cache"


def test_of_two_that_build_at_once_one_waits_for_the_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build_libraries(folder: Path) -> None:
        built.append(folder)
        (folder / "first").touch()
        Latch().pass_after_grace()  # the other could begin now
        (folder / "second").touch()

    monkeypatch.setattr(build, "build_libraries", build_libraries)
    with ThreadPoolExecutor(2) as pool:
        folders = [made.result() for made in [pool.submit(build.build) for _ in range(2)]]
    assert folders == [cache / "digest"] * 2
    assert len(built) == 1
    assert list(cache.iterdir()) == [cache / "digest"]
    assert {path.name for path in (cache / "digest").iterdir()} == {"first", "second"}


def test_what_is_built_is_not_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    monkeypatch.setattr(build, "build_libraries", built.append)
    assert build.build() == build.build()
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise build.StandInError("no")

    monkeypatch.setattr(build, "build_libraries", fail)
    with pytest.raises(build.StandInError):
        build.build()
    assert list(cache.iterdir()) == []


def test_a_missing_program_is_named() -> None:
    with pytest.raises(build.StandInError, match=r"no-such-compiler is not installed; install"):
        build.run(["no-such-compiler", "--version"])


def test_a_missing_package_is_named() -> None:
    with pytest.raises(build.StandInError, match=r"no_such_package is not installed; install"):
        build.find_package("no_such_package")
    with pytest.raises(build.StandInError, match=r"no-such-package is not installed; install"):
        build.get_version("no-such-package")


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_compilers_first_errors_are_told(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int main() { return nothing_of_that_name; }\n")
    with pytest.raises(build.StandInError, match=r"g\+\+ failed on .*wrong\.cpp:\n.*'nothing_of_that_name' was not"):
        build.run(["g++", "-c", source, "-o", tmp_path / "wrong.o"])


def test_a_stub_reports_its_name_and_fails() -> None:
    assert 'int aclFly(void) { standin_report_missing("aclFly"); return 200001; }' in build.write_stubs(["aclFly"])
