"""The archive of the GPU kit: the files of its wheels, with the GPU code of one architecture, packed small."""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from .slim import SlimError, slim
from .wheels import KitError, read_files

ARCHITECTURE = 90
# Kernels resemble others that are far away: with the usual dictionary of 8 MiB the kit is larger by a tenth.
FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},)
LEFT_OUT = (  # of vLLM; what ends with a slash is a folder
    "vllm/_deepselect_C.abi3.so",  # for sm_100 alone, as are qutlass and fmha_sm100
    "vllm/_flashkda_C.abi3.so",  # for a kind of linear attention that is not measured
    "vllm/_qutlass_C.abi3.so",
    "vllm/_rust_tool_parser.abi3.so",  # of the server, as are vllm-rs and the pictures of its pages
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/third_party/deep_gemm/",  # compiles kernels on the machine; for FP8, which is not measured
    "vllm/third_party/fmha_sm100/",
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # has code for sm_80, and PTX; vLLM takes FA3 on sm_90
)


class Packer:
    """Packs files into a compressed archive, which is the same each time; libraries are cut to the architecture."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.libraries: dict[str, dict[str, int]] = {}
        self.raw_bytes = 0
        self._archive = archive

    def add(self, path: str, content: bytes) -> None:
        """Add a file."""
        if re.search(r"\.so(\.\d+)*$", path):
            content = self._slim(path, content)
        info = tarfile.TarInfo(path)
        info.size = len(content)
        info.mode = 0o644
        self._archive.addfile(info, io.BytesIO(content))
        self.raw_bytes += len(content)

    def _slim(self, path: str, content: bytes) -> bytes:
        try:
            slimmed = slim(content, ARCHITECTURE)
        except SlimError as error:
            raise KitError(f"{path}: {error}. If the kit can do without it, add it to LEFT_OUT in {__file__}") from None
        if slimmed.containers:
            self.libraries[path] = {
                "bytes": len(content),
                "code_bytes": slimmed.code_bytes,
                "containers": slimmed.containers,
                "without_code": slimmed.without_code,
            }
            print(f"gpu-kit: {path}: {slimmed.code_bytes / 1e6:.1f} of {len(content) / 1e6:.1f} MB kept", flush=True)
        return slimmed.content


def pack(wheels: Sequence[Path], file: Path) -> Packer:
    """Pack the files of wheels, but for those that are left out, and return what was packed."""
    with lzma.open(file, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        packer = Packer(archive)
        unused = set(LEFT_OUT)
        for wheel in wheels:
            for path, content in read_files(wheel):
                if rule := find_rule(path):
                    unused.discard(rule)
                else:
                    packer.add(path, content)
    if unused:
        raise KitError(f"no wheel has {sorted(unused)[0]} any more: take it out of LEFT_OUT in {__file__}")
    return packer


def find_rule(path: str) -> str | None:
    """Return what says that a file is left out, if anything does."""
    return next((rule for rule in LEFT_OUT if path == rule or (rule.endswith("/") and path.startswith(rule))), None)
