"""Every environment variable that fkl_jax reads, in one place."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """An environment variable: its name, its default in words, the values it allows,
    what it does."""

    name: str
    default: str
    allowed: str
    meaning: str

    def value(self) -> str | None:
        """Return what is set, or None."""
        return os.environ.get(self.name) or None


CPU_ISA = Variable(
    name="FKL_JAX_CPU_ISA",
    default="the best that the CPU has",
    allowed="portable, avx2, avx512, avx512_bf16",
    meaning="instruction set of the CPU backend; read once, at its first call",
)
CACHE_DIR = Variable(
    name="FKL_JAX_CACHE_DIR",
    default="fkl_jax in the user's cache folder",
    allowed="a folder",
    meaning="where compiled kernels are kept (the CPU backend compiles none)",
)
CACHE_MIB = Variable(
    name="FKL_JAX_CACHE_MIB",
    default="1024",
    allowed="a whole number, 0 for no bound",
    meaning="size of the folder of compiled kernels; the longest unused go first",
)
DUMP_DIR = Variable(
    name="FKL_JAX_DUMP_DIR",
    default="nothing is kept",
    allowed="a folder",
    meaning="where the CUDA source, compiler log and binary of each compiled call go",
)
NVRTC = Variable(
    name="FKL_JAX_NVRTC",
    default="what JAX uses, the installed packages, the loader's path",
    allowed="a file, libnvrtc.so.12 or libnvrtc.so.13",
    meaning="the CUDA compiler library to use",
)
CUDA_FAMILY = Variable(
    name="FKL_JAX_CUDA_FAMILY",
    default="the best that the GPU has",
    allowed="sm80",
    meaning="kernel family of the CUDA backend; read when a call is lowered",
)
VARIABLES = (CPU_ISA, CACHE_DIR, CACHE_MIB, DUMP_DIR, NVRTC, CUDA_FAMILY)


def cache_dir() -> str:
    """Return the cache folder; it is made when something is kept there."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.path.expanduser("~"), ".cache"
    )
    return os.path.expanduser(CACHE_DIR.value() or os.path.join(base, "fkl_jax"))


def cache_bytes() -> int:
    """Return what compiled kernels may take on disk, 0 for any size.

    Raises:
        ValueError: the variable is no such number.
    """
    text = CACHE_MIB.value() or CACHE_MIB.default
    if not text.isdecimal():
        raise ValueError(
            f"{CACHE_MIB.name} is {text!r}; it must be {CACHE_MIB.allowed}."
        )
    return int(text) << 20


def dump_dir() -> str:
    """Return the folder for compiled sources, or an empty string."""
    return os.path.expanduser(DUMP_DIR.value() or "")


def cuda_family() -> str | None:
    """Return the kernel family that is asked for, None: the best.

    Raises:
        ValueError: there is no such family to ask for.
    """
    family = CUDA_FAMILY.value()
    if family not in (None, "sm80"):
        raise ValueError(
            f"{CUDA_FAMILY.name} is {family!r}; it must be {CUDA_FAMILY.allowed}, or "
            "not set."
        )
    return family
