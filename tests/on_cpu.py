"""Device code compiled by the host's C++ compiler, and called through ctypes."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import fkl_jax

DEVICE = Path(fkl_jax.__file__).parent / "device"
SHIM = Path(__file__).parent / "device"


def compile_text(text: str, folder: Path) -> ctypes.CDLL:
    """Compile a text that includes headers of `fkl_jax/device`; intrinsics come from
    tests/device/cuda_on_cpu.h."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the tests need a C++ compiler"
    source, library = folder / "on_cpu.cc", folder / "on_cpu.so"
    source.write_text(f'#include "cuda_on_cpu.h"\n{text}')
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    command += ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"]
    command += ["-Wno-tautological-compare"]  # a user's mask may compare so
    command += [f"-I{SHIM}", f"-I{DEVICE}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def pointer(x: np.ndarray) -> ctypes.c_void_p:
    assert x.flags.c_contiguous
    return ctypes.c_void_p(x.ctypes.data)


def pointers(xs: list[np.ndarray]) -> Any:
    return (ctypes.c_void_p * max(len(xs), 1))(*(x.ctypes.data for x in xs))
