"""The kit itself, which is built here unless it is up to date: its contents, and its libraries by NVIDIA's own tool."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tools.gpu_kit.archive import LEFT_OUT
from tools.gpu_kit.build import CONTENTS, LIMIT_BYTES, PINS, ROOT, SITE, measure, measure_tree
from tools.gpu_kit.slim import is_code_for, list_containers
from tools.gpu_kit.wheels import download, get_wheels, read_files, read_pins

pytestmark = pytest.mark.slow

CACHE = ROOT / ".gpu_kit_cache"
CUOBJDUMP = "nvidia-cuda-cuobjdump==13.5.37"
MOST_BYTES = 40 << 20  # of the kit; more is no fault, but should be meant
CODE = {  # library -> containers, and those without code for the GPU: kernels for others, or for all by PTX
    "vllm/_C_stable_libtorch.abi3.so": (117, 45),
    "vllm/_flashmla_C.abi3.so": (51, 0),
    "vllm/_flashmla_extension_C.abi3.so": (2, 0),
    "vllm/_moe_C_stable_libtorch.abi3.so": (34, 27),
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": (192, 0),
}
CUBINS = {  # library -> cubins for sm_90 and sm_90a
    "vllm/_C_stable_libtorch.abi3.so": 82,
    "vllm/_flashmla_C.abi3.so": 51,
    "vllm/_flashmla_extension_C.abi3.so": 2,
    "vllm/_moe_C_stable_libtorch.abi3.so": 7,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": 192,
}
WHOLE = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"  # has code for no other architecture


@pytest.fixture(scope="module")
def kit() -> Path:
    """Return the folder of the kit."""
    command = [sys.executable, "-m", "tools.gpu_kit.build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return ROOT / ".gpu_kit"


@pytest.fixture(scope="module")
def packed(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which the archive was unpacked."""
    folder = tmp_path_factory.mktemp("site")
    with tarfile.open(kit / SITE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def originals(kit: Path) -> list[Path]:
    """Return the wheels of which the kit was made."""
    return get_wheels(read_pins(PINS), CACHE / "wheels")


@pytest.fixture(scope="module")
def cuobjdump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return NVIDIA's program that lists what is in a fat binary."""
    folder = tmp_path_factory.mktemp("cuobjdump")
    download([CUOBJDUMP], folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("bin/cuobjdump"))
        program = Path(archive.extract(name, folder))
    program.chmod(0o755)
    return program


def test_it_fits_beside_the_working_tree(kit: Path) -> None:
    assert measure(kit) < MOST_BYTES
    assert measure(kit) + measure_tree(ROOT) < LIMIT_BYTES


def test_it_says_what_is_inside(kit: Path) -> None:
    contents = json.loads((kit / CONTENTS).read_text())
    assert contents["packages"] == read_pins(PINS)
    found = {path: (library["containers"], library["without_code"]) for path, library in contents["libraries"].items()}
    assert found == CODE
    assert sorted(path.name for path in kit.iterdir()) == [
        CONTENTS,
        *sorted(path.name for path in kit.glob("*-*.dist-info")),
        SITE,
    ]


def test_every_file_of_the_wheels_is_there_unchanged_but_for_libraries_with_gpu_code(
    packed: Path, originals: list[Path]
) -> None:
    files = {path: hashlib.sha256(content).digest() for wheel in originals for path, content in read_files(wheel)}
    there = {str(path.relative_to(packed)): path for path in packed.rglob("*") if path.is_file()}
    left_out = {path for path in files if path.startswith(LEFT_OUT)}
    assert there.keys() == files.keys() - left_out
    changed = {name for name, path in there.items() if hashlib.sha256(path.read_bytes()).digest() != files[name]}
    assert changed == CODE.keys() - {WHOLE}


def test_what_is_not_used_there_is_left_out(packed: Path) -> None:
    names = [str(path.relative_to(packed)) for path in packed.rglob("*")]
    assert not [name for name in names if re.search(r"deep_gemm/|fa2|_C\.cpython-|qutlass_C|vllm-rs|RECORD$", name)]
    assert "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" in names
    assert "vllm/v1/worker/gpu_worker.py" in names


@pytest.mark.parametrize("library", CODE)
def test_cubins_of_the_architecture_are_those_of_the_wheel(
    library: str, packed: Path, originals: list[Path], cuobjdump: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(originals[0]) as wheel:
        original = Path(wheel.extract(library, tmp_path))
    before, after = map(partial(list_cubins, cuobjdump), (original, packed / library))
    kept = [name for name in before if is_hopper(name)]
    assert len(kept) == CUBINS[library]
    assert [name for name in after if is_hopper(name)] == kept
    others = len(after) - len(kept)
    assert others == CODE[library][1], "one foreign cubin for each container without code"
    assert hash_code(packed / library) == hash_code(original)


def list_cubins(cuobjdump: Path, library: Path) -> list[str]:
    """Return the names of a library's cubins, such as `rms_norm.sm_90.cubin`, without their numbers."""
    done = subprocess.run([str(cuobjdump), "--list-elf", str(library)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return [
        re.sub(r"^ELF file +\d+: (.*?)\.?\d*\.(sm_\w+\.cubin)$", r"\1 \2", line) for line in done.stdout.splitlines()
    ]


def is_hopper(name: str) -> bool:
    """Return whether a cubin is for sm_90 or sm_90a."""
    return re.search(r"sm_90a?\.cubin$", name) is not None


def hash_code(library: Path) -> Counter[bytes]:
    """Return the digests of a library's entries for the architecture."""
    content = library.read_bytes()
    entries = [entry for each in list_containers(content) for entry in each.entries if is_code_for(entry, 90)]
    return Counter(hashlib.sha256(content[each.offset : each.offset + each.size]).digest() for each in entries)
