"""What `python -m fkl_jax doctor` prints: what is here, what works, and why not.

It is read when something is broken, so every fact is found on its own: one that cannot
be found becomes a line that says so and never stops the others.
"""

import functools
import importlib
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from types import ModuleType

Lines = list[tuple[str, str]]


def report() -> str:
    """The whole text."""
    sections: Iterable[tuple[str, Callable[[], Lines]]] = (
        ("versions", _versions),
        ("platform", _platform),
        ("cpu kernels", _cpu_kernels),
        ("gpu", _gpu),
        ("backends", _backends),
        ("cache", _cache),
        ("environment variables", _variables),
    )
    blocks = []
    for title, find in sections:
        try:
            lines = find()
        except Exception as error:  # a broken part must not hide the others
            lines = [(title, _not_found(error))]
        width = max(len(name) for name, _ in lines)
        blocks.append(
            "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in lines)])
        )
    return "\n\n".join(blocks)


def cpu_isa() -> str:
    """Instruction set that the CPU kernels run with, or why there is none."""
    return _attempt(lambda: str(_extension().cpu_isa()))


def _attempt(find: Callable[[], str]) -> str:
    try:
        return find()
    except Exception as error:  # see the module's docstring
        return _not_found(error)


def _not_found(error: BaseException) -> str:
    """One line, however long the error's own text is."""
    text = " ".join(str(error).split()) or "no further text"
    return f"not known: {type(error).__name__}: {text}"


def _extension() -> ModuleType:
    return importlib.import_module("fkl_jax._ext")


def _versions() -> Lines:
    lines: Lines = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("fkl_jax", _attempt(_own_version)),
    ]
    for name in ("jax", "jaxlib", "numpy"):
        lines.append((name, _attempt(functools.partial(metadata.version, name))))
    plugins = [
        f"{plugin.metadata['Name']} {plugin.version}"
        for plugin in metadata.distributions()
        if re.match(r"jax[-_](cuda|rocm|metal)", plugin.metadata["Name"] or "")
    ]
    lines.append(("jax plugins", ", ".join(sorted(set(plugins))) or "none"))
    lines.append(("ffi api, extension", _attempt(_extension_ffi_api)))
    lines.append(("ffi api, jaxlib", _attempt(_runtime_ffi_api)))
    return lines


def _own_version() -> str:
    package = importlib.import_module("fkl_jax")
    folder = pathlib.Path(__file__).parent
    text = f"{package.__version__} ({folder})"
    # Python puts the current folder first: in a checkout that is the package without
    # its extension, whatever is installed.
    if (folder.parent / "pyproject.toml").exists():
        text += (
            ": the SOURCE folder; from elsewhere, or with python -P, the installed one"
        )
    return text


def _extension_ffi_api() -> str:
    return ".".join(map(str, _extension().ffi_api_version))


def _runtime_ffi_api() -> str:
    """Newest version that the installed jaxlib accepts."""
    version = importlib.import_module("fkl_jax._ffi").runtime_api_version()
    return ".".join(map(str, version)) if version else "not stated by jaxlib"


def _platform() -> Lines:
    return [
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("cpu", _attempt(_cpu_name)),
        ("cores", _attempt(_num_cores)),
        ("jax devices", _attempt(_devices)),
    ]


def _cpu_name() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or "unnamed"


def _num_cores() -> str:
    total = os.cpu_count()
    if not hasattr(os, "sched_getaffinity"):
        return str(total)
    return f"{len(os.sched_getaffinity(0))} usable of {total}"


def _devices() -> str:
    import jax

    return ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices())


def _cpu_kernels() -> Lines:
    def available() -> str:
        return ", ".join(_extension().cpu_isas())

    return [("in use", cpu_isa()), ("runnable here", _attempt(available))]


def _gpu() -> Lines:
    """What the CUDA kernels need; "not known" of one is a missing piece, not a bug."""
    return [
        ("devices", _gpu_line(_gpus)),
        ("driver", _gpu_line(_driver)),
        ("nvrtc", _gpu_line(_nvrtc)),
    ]


def _gpu_line(find: Callable[[], str]) -> str:
    try:
        return find()
    except RuntimeError as error:  # the extension's own sentence
        return f"none: {error}"
    except Exception as error:  # see the module's docstring
        return _not_found(error)


def _gpus() -> str:
    devices = _extension().cuda_devices()
    return "; ".join(
        f"{d['name']}, compute capability {d['arch'] / 10:.1f}, "
        f"{d['num_multiprocessors']} multiprocessors, "
        f"{d['max_shared_bytes']} bytes of shared memory per block"
        for d in devices
    )


def _driver() -> str:
    version = _extension().cuda_driver_version()
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"


def _nvrtc() -> str:
    major, minor, path = _extension().nvrtc_version()
    return f"{major}.{minor} ({path})"


def _backends() -> Lines:
    """Each backend with yes or no and its reason, and what the default takes here."""
    answers = list(importlib.import_module("fkl_jax._backends").report())
    lines = [
        (name, ("yes" if can else "no") + (f": {reason}" if reason else ""))
        for name, can, reason in answers
    ]
    available = {name for name, can, _ in answers if can}
    lines.append(("implementation=None", _attempt(lambda: _choice(available))))
    return lines


def _choice(available: set[str]) -> str:
    import jax

    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    name = "ffi" if f"ffi on {platform}" in available else "xla"
    return f"{name!r} (JAX's default platform here is {platform})"


def _cache() -> Lines:
    folder = importlib.import_module("fkl_jax._config").cache_dir()
    return [
        ("folder", f"{folder} ({_attempt(lambda: _folder_state(folder))})"),
        ("compiled kernels", _attempt(lambda: _entries(folder))),
    ]


def _entries(folder: str) -> str:
    sizes = [e.stat().st_size for e in pathlib.Path(folder, "cuda").glob("*.cubin")]
    return f"{len(sizes)} entries, {sum(sizes) / 2**20:.1f} MiB" if sizes else "none"


def _folder_state(folder: str | os.PathLike[str]) -> str:
    """Whether something can be written there; looks, makes nothing."""
    path = pathlib.Path(folder).expanduser()
    if path.exists():
        is_usable = path.is_dir() and os.access(path, os.W_OK)
        return "exists, writable" if is_usable else "exists, NOT a writable folder"
    parent = next(p for p in path.absolute().parents if p.exists())
    if parent.is_dir() and os.access(parent, os.W_OK):
        return "will be made when needed"
    return f"cannot be made: {parent} is not a writable folder"


def _variables() -> Lines:
    lines: Lines = []
    for variable in importlib.import_module("fkl_jax._config").VARIABLES:
        value = variable.value()
        shown = "not set" if value is None else repr(value)
        text = f"{shown} (default: {variable.default}): {variable.meaning}"
        lines.append((variable.name, text))
    for name in ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS"):
        if name in os.environ:
            lines.append((name, f"{os.environ[name]!r}: read by JAX"))
    return lines
