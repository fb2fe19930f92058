"""Run the kit where there is no GPU, as it runs where there is one: `run.sh`, all parts, small sizes.

    python -m tools.gpu_kit.rehearse [--device cpu|npu] [PART | PART/JOB ...]

`cpu` takes vLLM's CPU build, and gloo in place of NCCL. `npu` takes the real torch_npu over the stand-in for CANN,
without vLLM. The interpreter's own packages are used: the kit that is unpacked has but the entry point of the plugin.
What has no meaning there says so in its results. A rehearsal is no evidence: `tools.gpu_kit.page` refuses its results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from .build import CONTENTS, PLUGIN, ROOT, SITE, write_distribution

FOLDER = ROOT / "build" / "gpu_kit"
SECONDS = 3000  # for all parts: other work may take the cores meanwhile
PATIENCE = 5  # times the limits of parts on a GPU
PLUGIN_NAME = "gpu_kit-0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, and say where the results are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    parser.add_argument("--folder", type=Path, help="for everything that is written (default: build/gpu_kit/DEVICE)")
    parser.add_argument("parts", nargs="*", metavar="PART", help="or PART/JOB; all without any")
    options = parser.parse_args(arguments)
    folder = (options.folder or FOLDER / options.device).resolve()
    status = rehearse(folder, options.device, options.parts)
    print(f"results: {folder / 'out' / 'results.json'}")
    return status


def rehearse(folder: Path, device: str, parts: Sequence[str] = ()) -> int:
    """Run the kit in a folder; all parts anew, or some of them as a second call on a warm machine does."""
    if not parts:
        shutil.rmtree(folder, ignore_errors=True)
    kit, out = make_kit(folder / "kit"), folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    environment = {
        "KIT_WORK": str(folder / "work"),
        "KIT_PYTHON": sys.executable,
        "KIT_SECONDS": str(SECONDS),
        "KIT_PATIENCE": str(PATIENCE),
        "OUT": str(out),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    words = ["bash", "tools/gpu_kit/run.sh", str(kit), "--device", device, *parts]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode


def make_kit(folder: Path) -> Path:
    """Make a kit that has the plugin's entry point, and no package."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / f"{PLUGIN_NAME}.dist-info", ignore_errors=True)
    write_distribution(folder, PLUGIN_NAME, PLUGIN)
    (folder / CONTENTS).write_text('{"packages": {}}\n')
    readme = folder / "REHEARSAL"
    readme.write_text("No package is in here.\n")
    with tarfile.open(folder / SITE, "w:xz") as archive:
        archive.add(readme, readme.name)
    return folder


if __name__ == "__main__":
    sys.exit(main())
