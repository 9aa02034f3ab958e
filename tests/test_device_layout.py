"""The address maps of `device/tile/layout.cuh`, compiled by the host's C++ compiler and
run on the CPU: fragments get the right elements, without bank conflicts."""

import shutil
import subprocess
from pathlib import Path

import fkl_jax

DEVICE = Path(fkl_jax.__file__).parent / "device"
SOURCE = Path(__file__).parent / "device" / "layout_test.cc"


def test_fragments_get_their_elements_without_bank_conflicts(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the tests need a C++ compiler"
    program = tmp_path / "layout_test"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", f"-I{DEVICE}"]
    subprocess.run([*command, str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
