"""What a benchmark was run on, and who else was using it."""

import os
import pathlib
import platform
import re
import resource
from typing import Any

import jax
import numpy as np

import fkl_jax
from fkl_jax import _doctor


def read_text(path: str) -> str:
    """Contents of a file of the kernel's, empty where there is none."""
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel reports them; empty where it does not."""
    found = re.search(r"^flags\s*:(.*)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def num_cores() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cores(number: int) -> None:
    """Keep to the first CPUs; to be called before JAX starts its thread pool."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def facts() -> dict[str, Any]:
    """CPU, cores, load, versions and the instruction set in use."""
    model = re.search(r"^model name\s*:\s*(.*)$", read_text("/proc/cpuinfo"), re.M)
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": num_cores(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "fkl_jax": fkl_jax.__version__,
        "isa": _doctor.cpu_isa(),
    }


class OtherLoad:
    """Share of the machine that other processes used since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: busy CPUs of the machine, this process, all CPUs together."""
        ticks_per_second = os.sysconf("SC_CLK_TCK")
        fields = read_text("/proc/stat").split("\n", 1)[0].split()[1:9]
        seconds = [int(field) / ticks_per_second for field in fields]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own = usage.ru_utime + usage.ru_stime
        idle = sum(seconds[3:5])  # idle, and waiting for a disk
        return sum(seconds) - idle, own, sum(seconds)

    def share(self) -> float | None:
        """Between 0 and 1; None where the kernel does not tell."""
        pairs = zip(self._start, self._now(), strict=True)
        busy, own, total = (end - start for start, end in pairs)
        return max(0.0, busy - own) / total if total else None
