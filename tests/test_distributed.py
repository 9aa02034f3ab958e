"""Several processes, each with several devices: equal to one device."""

import functools
import os
import socket
import subprocess
import sys

import distributed_worker
import jax
import numpy as np


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_of_two_devices(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {
        "query": (4, 9, 4, 8),
        "key": (4, 9, 2, 8),
        "value": (4, 9, 2, 16),
        "slopes": (4,),
        "ring query": (2, 16, 4, 8),
        "ring key": (2, 16, 2, 8),
        "ring value": (2, 16, 2, 16),
    }
    arrays = {
        name: np.asarray(rng.standard_normal(shape), np.float32)
        for name, shape in shapes.items()
    }
    arrays["cap"] = np.float32(1.5)
    arrays["lengths"] = np.asarray([9, 1, 5, 7], np.int32)
    one = jax.jit(distributed_worker.step)(
        *(arrays[n] for n in distributed_worker.SPECS)
    )
    results = dict(zip(distributed_worker.RESULTS, one, strict=True))
    ring = jax.jit(
        functools.partial(
            distributed_worker.ring_step, distributed_worker.on_one_device
        )
    )(*(arrays[n] for n in distributed_worker.RING_SPECS))
    results |= dict(zip(distributed_worker.RING_RESULTS, ring, strict=True))
    np.savez(tmp_path / "arrays.npz", **arrays, **results)

    port = str(_free_port())
    command = [sys.executable, "-P", distributed_worker.__file__]
    workers = [
        subprocess.Popen(
            [*command, str(rank), port, str(tmp_path)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(texts)[-4000:]
