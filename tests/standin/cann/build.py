"""Build the stand-in's libraries against the installed torch_npu, once for each state of what they are made from.

Run as a script it prints the folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
CACHE = SOURCES.parents[2] / "build" / "standin_cann"
COMPILERS_AT_ONCE = 2
ERROR_LINES = 12
COMPILE = ("g++", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-pthread")

# torch_npu needs all of them. What it takes from those without sources is in libascendcl, or is not needed.
LIBRARIES = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "hccl", "opapi")
LIBRARIES_BY_SOURCES = {
    "ascendcl": ("runtime/*.cpp",),
    "hccl": ("collectives*.cpp",),
    "opapi": ("operators/*.cpp",),
}
# Of torch_npu, what is loaded by `import torch_npu`; the others want more of CANN than the stand-in has.
NEEDY_LIBRARIES = ("libtorch_npu.so", "libtensorpipe.so", "libnpu_profiler.so")


class StandInError(RuntimeError):
    """The stand-in cannot be built or used; the message says why and what to do."""


def build() -> Path:
    """Return the folder with the libraries, after building them if that was not done before; one process does.

    Raises:
        StandInError: the compiler or torch_npu is missing, or something does not compile.
    """
    folder = CACHE / find_digest()
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with lock(CACHE):
            if not folder.is_dir():  # another process may have built them meanwhile
                build_into(folder)
    return folder


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def build_into(folder: Path) -> None:
    """Build the libraries, and give their folder its name when all are there."""
    scratch = Path(tempfile.mkdtemp(prefix="unfinished-", dir=CACHE))
    try:
        build_libraries(scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find_digest() -> str:
    """Return a name for the state of all that the libraries are made from."""
    digest = hashlib.sha256()
    for package in ("torch", "torch-npu"):
        digest.update(get_version(package).encode())
    digest.update(run(["g++", "--version"]).splitlines()[0].encode())
    for source in sorted(path for pattern in ("*.h", "*.cpp", "build.py") for path in SOURCES.rglob(pattern)):
        digest.update(f"{source.relative_to(SOURCES)}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def build_libraries(folder: Path) -> None:
    """Compile and link all libraries into a folder."""
    jobs = [(source, folder / f"{name}-{source.stem}.o") for name in LIBRARIES for source in find_sources(name)]
    with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
        list(pool.map(lambda job: compile_source(*job), jobs))
    (folder / "ascendcl-missing.c").write_text(write_stubs(find_missing_functions(folder)))
    run(["g++", "-x", "c", "-w", "-fPIC", "-c", folder / "ascendcl-missing.c", "-o", folder / "ascendcl-missing.o"])
    for name in LIBRARIES:
        link(name, folder)
    for object_file in folder.glob("*.o"):
        object_file.unlink()


def find_sources(library: str) -> list[Path]:
    """Return the sources of a library; some libraries have none and are empty."""
    return sorted(source for pattern in LIBRARIES_BY_SOURCES.get(library, ()) for source in SOURCES.glob(pattern))


def compile_source(source: Path, object_file: Path) -> None:
    """Compile one file. Other people's headers are system headers, so that their warnings are not ours."""
    npu, torch = find_package("torch_npu"), find_package("torch")
    headers = [
        npu / "include",
        npu / "include/third_party/acl/inc",
        npu / "include/third_party/hccl/inc",
        torch / "include",
        torch / "include/torch/csrc/api/include",
    ]
    flags = [flag for folder in headers for flag in ("-isystem", folder)]
    run([*COMPILE, f"-I{SOURCES}", *flags, "-c", source, "-o", object_file])


def link(name: str, folder: Path) -> None:
    """Link one library. All but the first use the first; operators and collectives use torch as well."""
    torch = find_package("torch") / "lib"
    others: list[str | Path] = [] if name == LIBRARIES[0] else [f"-L{folder}", f"-l{LIBRARIES[0]}"]
    if find_sources(name) and name != LIBRARIES[0]:
        others += [f"-L{torch}", "-ltorch_cpu", "-lc10", "-lrt"]
    rpath = f"-Wl,-rpath,$ORIGIN:{torch}"
    objects = sorted(folder.glob(f"{name}-*.o"))
    soname = f"-Wl,-soname,lib{name}.so"
    run(["g++", "-shared", "-pthread", *objects, soname, rpath, "-Wl,--no-as-needed", *others, "-o", lib(folder, name)])


def lib(folder: Path, name: str) -> Path:
    """Return the path of a library."""
    return folder / f"lib{name}.so"


def find_missing_functions(folder: Path) -> list[str]:
    """Return the functions of CANN that torch_npu links to and the stand-in has not.

    They are what torch_npu leaves undefined and neither torch, nor the system, nor the stand-in defines. The system's
    symbols have versions (`getpid@GLIBC_2.17`), or are to be found in this process.
    """
    npu, torch = find_package("torch_npu") / "lib", find_package("torch") / "lib"
    needed = set().union(*(list_symbols(npu / name, "--undefined-only") for name in NEEDY_LIBRARIES))
    libraries = [*torch.glob("*.so*"), *npu.glob("*.so"), *folder.glob("*.o")]
    defined = set().union(*(list_symbols(library, "--defined-only") for library in libraries))
    process = ctypes.CDLL(None)
    return sorted(name for name in needed - defined if "@" not in name and not hasattr(process, name))


def list_symbols(library: Path, which: str) -> set[str]:
    """Return the names of a library's or an object's symbols, without those that may stay undefined."""
    dynamic = [] if library.suffix == ".o" else ["--dynamic"]
    rows = [row.split() for row in run(["nm", *dynamic, which, library]).splitlines()]
    return {row[-1] for row in rows if len(row) >= 2 and row[-2] not in "wv"}


def write_stubs(functions: Sequence[str]) -> str:
    """Return C that reports a call of any of the functions and fails with ACL_ERROR_API_NOT_SUPPORT."""
    stubs = "".join(f'int {name}(void) {{ standin_report_missing("{name}"); return 200001; }}\n' for name in functions)
    return "void standin_report_missing(const char* name);\n" + stubs


def find_package(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise StandInError(f"{name} is not installed; install the wheels of torch and torch_npu.")
    return Path(spec.origin).parent


def get_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise StandInError(f"{package} is not installed; install the wheels of torch and torch_npu.") from None


def run(command: Sequence[str | Path]) -> str:
    """Run a program of the compiler's and return what it prints."""
    try:
        done = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise StandInError(f"{command[0]} is not installed; install GCC with C++ and binutils.") from None
    except subprocess.CalledProcessError as error:
        told = [line for line in error.stderr.splitlines() if "error: " in line or "undefined reference" in line]
        first = "\n".join((told or error.stderr.splitlines())[:ERROR_LINES])
        raise StandInError(f"{command[0]} failed on {command[-3]}:\n{first}") from None
    return done.stdout


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except StandInError as error:
        sys.exit(str(error))
