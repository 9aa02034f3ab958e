"""Loading and launching against a driver that only writes down what it is asked."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nvrtc
import pytest
from test_cuda_cache import library_dirs

import fkl_jax
from fkl_jax._cuda_launch import Kernel, Launch, TensorMap

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs libcuda.so.1"),
]

GLUE = """
#include "attention/params.cuh"
extern "C" __global__ void __launch_bounds__(128)
first(const __grid_constant__ fkl::ForwardParams params) { params.lse[0] = 1; }
extern "C" __global__ void __launch_bounds__(64)
second(const __grid_constant__ fkl::ForwardParams params) { params.lse[0] += 1; }
"""
LAUNCH = Launch(
    kernels=(
        Kernel(name="first", threads=128, shared_bytes=60000, rows="q", tile=4),
        Kernel(name="second", threads=64),
    ),
    scratch_bytes=256,
)

# Runs launches with arrays at made-up addresses.
PROCESS = """
import json, sys, threading
from fkl_jax import _ext
task = json.loads(sys.argv[1])
_ext.set_cuda_settings(task["device"], "", task["dirs"], task["cache"], "")
shape, base = [2, 8, 1, 16], task["address"]
rows = lambda i: (base + 4096 * i, "bfloat16", shape)
operands = {"query": rows(0), "key": rows(1), "value": rows(2)}
operands["scale"] = (base, "float32", [])
results = {"out": rows(3), "lse": (base, "float32", [2, 8])}
results["workspace"] = (1 << 20, "uint8", [256])

def launch(glue=task["glue"], names=task["names"]):
    arguments = (False, 1, 0, 0, operands, results, task["launch"], glue, names)
    try:
        _ext.cuda_launch(*arguments)
    except RuntimeError as error:
        print(error)

threads = [threading.Thread(target=launch) for _ in range(task["threads"])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for _ in range(task["repeats"]):
    launch()
print(json.dumps(_ext.cuda_counts()))
"""


@pytest.fixture(name="process")
def _process(tmp_path):
    source = HERE / "device" / "fake_driver.c"
    library = tmp_path / "libcuda.so.1"
    command = [COMPILER, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    log = tmp_path / "log"

    def run(glue=GLUE, names=LAUNCH.names, address=1 << 16, launch=LAUNCH, **options):
        environment = {k: v for k, v in options.items() if k.startswith("FAKE_")}
        task = {
            "device": str(Path(fkl_jax.__file__).parent / "device"),
            "dirs": library_dirs(),
            "cache": str(tmp_path / "cache"),
            "launch": launch.encode().tolist(),
            "glue": glue,
            "names": names,
            "address": address,
            "threads": options.get("threads", 0),
            "repeats": options.get("repeats", 1),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROCESS, json.dumps(task)],
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(tmp_path),
                "FAKE_LOG": str(log),
                "JAX_PLATFORMS": "cpu",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        *said, counts = done.stdout.splitlines()
        if said and said[0].startswith("no NVRTC"):
            nvrtc.missing(said[0])
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return said, json.loads(counts), lines

    return run


def test_first_launch_loads_and_the_others_only_launch(process):
    said, counts, log = process(repeats=2)
    assert said == []
    assert counts["compiled"] == 1 and counts["loaded"] == 1
    launch = [
        "push",
        "memset 100000 0 256",
        "launch",
        "kernel first 4 128 60000 1",
        "launch",
        "kernel second 2 64 0 1",
        "pop",
    ]
    load = [
        "capture mode 2",
        "load 464c457f",
        "attribute 8 60000",
        "attribute 8 0",
        "capture mode 0",
    ]
    assert log == ["retain 0", launch[0], *load, *launch[1:], *launch]


def test_racing_threads_load_once(process):
    said, counts, log = process(threads=6)
    assert said == [] and counts["compiled"] == 1
    assert sum(line.startswith("load") for line in log) == 1
    assert sum(line.startswith("kernel first") for line in log) == 7


def test_misaligned_rows_get_kernels_of_their_own(process):
    _, counts, _ = process()
    assert counts["compiled"] == 1
    _, counts, _ = process()
    assert counts["compiled"] == 0 and counts["disk_hits"] == 1
    _, counts, _ = process(address=(1 << 16) + 2)
    assert counts["compiled"] == 1


def test_classes_have_kernels_and_maps_of_their_own(process):
    launch = Launch(
        kernels=(Kernel(name="first", threads=128, rows="q", tile=4, max_blocks=3),),
        tensor_maps=(TensorMap(array="key", rows=8, columns=64),),
        unaligned=Launch(kernels=(Kernel(name="second", threads=64),)),
    )
    _, _, log = process(launch=launch, names=launch.names)
    assert log[-5:-1] == [
        "map 9 4 3",
        "map sizes 16 2 strides 256",
        "launch",
        "kernel first 3 128 0 1",
    ]
    _, _, log = process(launch=launch, names=launch.names, address=(1 << 16) + 2)
    assert log[-2] == "kernel second 2 64 0 1"
    assert not any(line.startswith("map") for line in log)


def test_old_gpu_is_a_sentence(process):
    said, _, log = process(FAKE_ARCH="75")
    assert said == [
        "Fake GPU has compute capability 7.5; the kernels need 8.0 or newer"
    ]
    assert not any(line.startswith("load") for line in log)


def test_gpu_with_little_shared_memory_is_a_sentence(process, monkeypatch):
    encoded = LAUNCH.encode()
    encoded[9] = 200000
    monkeypatch.setattr(type(LAUNCH), "encode", lambda self: encoded)
    said, _, _ = process()
    assert "needs 200000 bytes of shared memory per block" in said[0]
    assert "Fake GPU has 101376" in said[0]


def test_driver_errors_name_call_code_and_name(process):
    said, _, _ = process(FAKE_LAUNCH_RESULT="701")
    assert said == ["cuLaunchKernel failed with code 701 (CUDA_ERROR_FAKE): made up"]
    said, counts, _ = process(FAKE_LOAD_RESULT="209")
    assert said[0].startswith("cuModuleLoadData failed with code 209")
    assert counts["loaded"] == 0


def test_missing_entry_point_unloads_the_module(process):
    said, _, log = process(names="first missing")
    assert said[0].startswith("cuModuleGetFunction(missing) failed with code 500")
    assert "unload" in log


def test_failed_load_is_tried_again(process):
    said, _, log = process(FAKE_LOAD_RESULT="2", repeats=2)
    assert len(said) == 2 and sum(line.startswith("load") for line in log) == 2
