"""NVRTC through ctypes: compiles a glue text to a cubin, without GPU, driver or the
extension module."""

import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import NoReturn

import pytest

import fkl_jax

DEVICE = Path(fkl_jax.__file__).parent / "device"


def missing(reason: str) -> NoReturn:
    """Skip a test that needs NVRTC, or fail it where NVRTC is required to be there."""
    if os.environ.get("FKL_JAX_REQUIRE_NVRTC", "0") not in ("", "0"):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclasses.dataclass(frozen=True)
class Compiled:
    cubin: bytes
    log: str

    @property
    def spill_bytes(self) -> int:
        """Of all kernels: stores and loads."""
        found = re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)
        return sum(map(int, found))

    @property
    def registers(self) -> list[int]:
        return [int(n) for n in re.findall(r"Used (\d+) registers", self.log)]

    @property
    def warnings(self) -> list[str]:
        return [
            line
            for line in self.log.splitlines()
            if "warning" in line.lower() or re.search(r"\bC75\d\d\b", line)
        ]


class CompileError(RuntimeError):
    """The log of a compilation that failed."""


class Nvrtc:
    """One version of NVRTC, found in a folder."""

    def __init__(self, folder: Path):
        # The builtins are looked up by name; once loaded they are found anywhere.
        for path in sorted(folder.glob("libnvrtc-builtins*.so*")):
            ctypes.CDLL(str(path))
        (library,) = sorted(folder.glob("libnvrtc.so*"))
        self._lib = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, text: str, arch: str, aligned: bool = True) -> Compiled:
        headers = _headers()
        names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        program = ctypes.c_void_p()
        self._lib.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"glue.cu", len(headers), texts, names
        )
        options = [
            f"--gpu-architecture={arch}",
            "--std=c++17",
            "-default-device",
            "--ptxas-options=-v",
            f"-DFKL_ALIGNED={int(aligned)}",
        ]
        argv = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        result = self._lib.nvrtcCompileProgram(program, len(options), argv)
        log = self._read(program, "nvrtcGetProgramLog").decode().rstrip("\0")
        if result:
            raise CompileError(log)
        cubin = self._read(program, "nvrtcGetCUBIN")
        self._lib.nvrtcDestroyProgram(ctypes.byref(program))
        return Compiled(cubin, log)

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._lib, f"{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._lib, what)(program, buffer)
        return buffer.raw


@functools.cache
def find(major: int) -> Nvrtc | str:
    """NVRTC of CUDA `major` from the installed wheels (or the folder that
    FKL_JAX_TEST_NVRTC_<major> names), or why there is none."""
    folders = []
    if named := os.environ.get(f"FKL_JAX_TEST_NVRTC_{major}"):
        folders.append(Path(named))
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        part = "cuda_nvrtc" if major == 12 else f"cu{major}"
        folders.append(Path(root) / part / "lib")
    for folder in folders:
        if list(folder.glob(f"libnvrtc.so.{major}*")):
            return Nvrtc(folder)
    wheel = "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"
    return f"no NVRTC of CUDA {major}; pip install {wheel}"


@functools.cache
def _headers() -> dict[str, bytes]:
    return {
        path.relative_to(DEVICE).as_posix(): path.read_bytes()
        for path in sorted(DEVICE.rglob("*.cuh"))
    }
