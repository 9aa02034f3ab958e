"""The cache of compiled kernels, and what its compiler says when something is wrong."""

import concurrent.futures
import hashlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import nvrtc
import pytest

import fkl_jax
from fkl_jax import _config, _ext, _ffi

DEVICE = Path(fkl_jax.__file__).parent / "device"
ARCH = "sm_80"
# Two folders that hold NVRTC may be named for a machine without the packages.
EXTRA = [
    os.environ[name]
    for name in ("FKL_JAX_TEST_NVRTC_13", "FKL_JAX_TEST_NVRTC_12")
    if name in os.environ
]


def library_dirs():
    folders = ("cu13", "cuda_nvrtc")
    site = [f"{p}/nvidia/{f}/lib" for p in sys.path if p for f in folders]
    return [*EXTRA, *site]


def configure(cache_dir="", *, device_dir=DEVICE, dump_dir="", cache_bytes=0):
    _ext.set_cuda_settings(
        str(device_dir),
        "",
        library_dirs(),
        str(cache_dir),
        str(dump_dir),
        cache_bytes,
    )


def glue(body="params.lse[threadIdx.x] = FKL_ALIGNED;", mark=None):
    mark = random.getrandbits(64) if mark is None else mark
    return (
        f"// {mark}\n"
        '#include "attention/params.cuh"\n'
        'extern "C" __global__ void __launch_bounds__(128)\n'
        "kernel(const __grid_constant__ fkl::ForwardParams params) {\n"
        f"  {body}\n"
        "}\n"
    )


@pytest.fixture(name="nvrtc")
def _nvrtc():
    configure()
    try:
        yield _ext.nvrtc_version()
    except RuntimeError as missing:
        nvrtc.missing(str(missing))
    finally:
        _ffi.configure_cuda()


@pytest.fixture(name="cache")
def _cache(nvrtc, tmp_path):
    configure(tmp_path / "cache")
    return tmp_path / "cache"


def change(before):
    after = _ext.cuda_counts()
    return {k: after[k] - before[k] for k in after if after[k] != before[k]}


def entries(cache):
    return sorted((cache / "cuda").iterdir())


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 100_003])
def test_sha256_is_the_standard_one(size):
    data = random.Random(size).randbytes(size)
    assert _ext.sha256(data) == hashlib.sha256(data).hexdigest()


def test_second_request_reads_the_disk(cache):
    text, before = glue(), _ext.cuda_counts()
    first = _ext.cached_cubin(text, ARCH)
    assert change(before) == {"compiled": 1}
    assert _ext.cached_cubin(text, ARCH) == first
    assert change(before) == {"compiled": 1, "disk_hits": 1}
    assert [e.name for e in entries(cache)] == [
        _ext.cuda_cache_key(text, ARCH) + ".cubin"
    ]


def test_racing_threads_compile_once(cache):
    text, before = glue(), _ext.cuda_counts()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(lambda _: _ext.cached_cubin(text, ARCH), range(8)))
    assert len(set(cubins)) == 1
    assert change(before)["compiled"] == 1


def test_distinct_sources_compile_at_the_same_time(cache):
    texts, before = [glue() for _ in range(4)], _ext.cuda_counts()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: _ext.cached_cubin(text, ARCH), texts))
    assert change(before) == {"compiled": 4}
    assert len(entries(cache)) == 4


OTHER_PROCESS = """
import sys
from fkl_jax import _ext
device, cache, text, *dirs = sys.argv[1:]
_ext.set_cuda_settings(device, "", dirs, cache, "")
cubin = _ext.cached_cubin(text, "sm_80")
counts = _ext.cuda_counts()
print(_ext.sha256(cubin), counts["compiled"], counts["disk_hits"])
"""


def start_process(cache, text):
    command = [sys.executable, "-P", "-c", OTHER_PROCESS, str(DEVICE), str(cache), text]
    command += library_dirs()
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_and_race(cache):
    text = glue()
    racing = [start_process(cache, text) for _ in range(3)]
    said = [p.communicate(timeout=120)[0].split() for p in racing]
    assert all(p.returncode == 0 for p in racing)
    assert len({digest for digest, *_ in said}) == 1
    assert len(entries(cache)) == 1, "something was left beside the entry"
    late = start_process(cache, text)
    assert late.communicate(timeout=120)[0].split()[1:] == ["0", "1"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b[:10],
        lambda b: b[: len(b) // 2],
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        lambda b: b + b"more",
        lambda b: b"x" * len(b),
    ],
    ids=["empty", "header", "half", "bit", "longer", "garbage"],
)
def test_broken_entry_is_rebuilt(cache, damage):
    text = glue()
    first = _ext.cached_cubin(text, ARCH)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    before = _ext.cuda_counts()
    assert _ext.cached_cubin(text, ARCH) == first
    assert change(before) == {"compiled": 1, "broken_entries": 1}
    assert entry.read_bytes() == whole


def test_folder_that_cannot_be_written_means_no_disk_cache(nvrtc, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    configure(file / "below")
    text, before = glue(), _ext.cuda_counts()
    assert _ext.cached_cubin(text, ARCH)
    assert change(before) == {"compiled": 1, "failed_writes": 1}


def test_key_holds_all_that_decides_the_result(cache, tmp_path):
    text = glue()
    keys = {
        _ext.cuda_cache_key(text, ARCH),
        _ext.cuda_cache_key(text, ARCH, False),
        _ext.cuda_cache_key(text, "sm_90a"),
        _ext.cuda_cache_key(text + "\n", ARCH),
    }
    copy = tmp_path / "device"
    shutil.copytree(DEVICE, copy)
    configure(cache, device_dir=copy)
    # The folder's name does not matter, its content does.
    assert _ext.cuda_cache_key(text, ARCH) in keys
    header = copy / "core" / "math.cuh"
    header.write_text(header.read_text() + "\n// changed\n")
    shutil.move(copy, tmp_path / "changed")
    configure(cache, device_dir=tmp_path / "changed")
    keys.add(_ext.cuda_cache_key(text, ARCH))
    assert len(keys) == 5


def test_compile_reports_registers_spills_and_warnings(nvrtc):
    made = _ext.compile_cuda(glue("int unused; params.lse[0] = 1;"), ARCH)
    assert made["cubin"][:4] == b"\x7fELF"
    assert 0 < made["registers"]["kernel"] < 256
    assert made["spill_bytes"] == 0 and made["spills"] == {"kernel": 0}
    assert any("unused" in w for w in made["warnings"])
    assert made["seconds"] > 0
    assert _ext.compile_cuda(glue(), ARCH)["warnings"] == []


SPILLS = """
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = params.lse[i * 128 + threadIdx.x];
  for (int r = 0; r < params.num_splits; ++r) {
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 1) % 64] + v[(i + 7) % 64];
  }
  for (int i = 0; i < 64; ++i) params.lse[i * 128 + threadIdx.x] = v[i];
"""


def test_spills_are_counted(nvrtc):
    text = glue(SPILLS).replace("__launch_bounds__(128)", "__launch_bounds__(1024, 2)")
    assert _ext.compile_cuda(text, ARCH)["spill_bytes"] > 0


def test_compile_error_shows_the_line_and_how_to_keep_the_source(nvrtc):
    with pytest.raises(RuntimeError) as error:
        _ext.compile_cuda(glue("no_such_name = 1;"), ARCH)
    text = str(error.value)
    assert "could not compile" in text and ARCH in text
    assert 'glue.cu(5): error: identifier "no_such_name" is undefined' in text
    assert "FKL_JAX_DUMP_DIR" in text


def test_sources_are_kept_on_request(nvrtc, tmp_path):
    configure(dump_dir=tmp_path / "kept")
    good, bad = glue(), glue("no_such_name = 1;")
    _ext.compile_cuda(good, ARCH)
    with pytest.raises(RuntimeError, match="the source is .*kept/.*cu"):
        _ext.compile_cuda(bad, ARCH)
    kept = list((tmp_path / "kept").iterdir())
    assert sorted(p.suffix for p in kept) == [".cu", ".cu", ".cubin", ".log", ".log"]
    assert {p.read_text() for p in kept if p.suffix == ".cu"} == {good, bad}


def test_headers_of_another_version_do_not_compile(nvrtc, tmp_path):
    copy = tmp_path / "device"
    shutil.copytree(DEVICE, copy)
    params = copy / "attention" / "params.cuh"
    changed = params.read_text().replace("int num_splits;", "int num_splits[8];")
    params.write_text(changed)
    configure(device_dir=copy)
    with pytest.raises(RuntimeError, match="different versions; reinstall fkl_jax"):
        _ext.compile_cuda(glue("params.lse[0] = 1;"), ARCH)


def test_missing_headers_are_a_sentence(nvrtc, tmp_path):
    configure(device_dir=tmp_path)
    with pytest.raises(RuntimeError, match="no device headers in .*reinstall fkl_jax"):
        _ext.compile_cuda(glue(), ARCH)


def test_architecture_that_nvrtc_does_not_know(nvrtc):
    assert _ext.cuda_arch_name(80) == "sm_80"
    assert _ext.cuda_arch_name(90) == "sm_90a"
    with pytest.raises(RuntimeError, match="compute capability 99.0; install a newer"):
        _ext.cuda_arch_name(990)


def test_the_longest_unused_entries_go(cache):
    texts = [glue() for _ in range(4)]
    paths = []
    for n, text in enumerate(texts):
        _ext.cached_cubin(text, ARCH)
        paths.append(cache / "cuda" / f"{_ext.cuda_cache_key(text, ARCH)}.cubin")
        os.utime(paths[n], (1000.0 + n, 1000.0 + n))
    _ext.cached_cubin(texts[0], ARCH)  # used again: the newest of all
    size = paths[0].stat().st_size
    configure(cache, cache_bytes=4 * size)
    before = _ext.cuda_counts()
    _ext.cached_cubin(glue(), ARCH)
    # Five entries are one too many, and a tenth of four is to be left free.
    assert change(before) == {"compiled": 1, "evicted": 2}
    assert [path.exists() for path in paths] == [True, False, False, True]
    assert len(entries(cache)) == 3
    _ext.cached_cubin(glue(), ARCH)
    assert change(before) == {"compiled": 2, "evicted": 2}


def test_an_evicted_entry_is_made_again(cache):
    configure(cache, cache_bytes=1)
    text, before = glue(), _ext.cuda_counts()
    first = _ext.cached_cubin(text, ARCH)
    assert entries(cache) == []
    assert _ext.cached_cubin(text, ARCH) == first
    assert change(before) == {"compiled": 2, "evicted": 2}


def test_without_a_bound_nothing_goes(cache):
    configure(cache, cache_bytes=0)
    before = _ext.cuda_counts()
    for _ in range(3):
        _ext.cached_cubin(glue(), ARCH)
    assert change(before) == {"compiled": 3}
    assert len(entries(cache)) == 3


@pytest.mark.parametrize("text, size", [("", 1 << 30), ("0", 0), ("3", 3 << 20)])
def test_bound_of_the_cache(monkeypatch, text, size):
    monkeypatch.setenv("FKL_JAX_CACHE_MIB", text)
    assert _config.cache_bytes() == size


def test_bad_bound_is_a_sentence(monkeypatch):
    monkeypatch.setenv("FKL_JAX_CACHE_MIB", "-1")
    with pytest.raises(ValueError, match="FKL_JAX_CACHE_MIB is '-1'; it must be a who"):
        _config.cache_bytes()


NO_NVRTC = """
import sys
from fkl_jax import _ext
_ext.set_cuda_settings(sys.argv[1], sys.argv[2], [], "", "")
try:
    _ext.compile_cuda("", "sm_80")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "named, expected",
    [
        ("", "or set FKL_JAX_NVRTC to libnvrtc.so.1"),
        ("/no/such/library", "FKL_JAX_NVRTC cannot be opened: /no/such/library"),
    ],
)
def test_missing_nvrtc_is_a_sentence(named, expected):
    command = [sys.executable, "-P", "-c", NO_NVRTC, str(DEVICE), named]
    said = subprocess.check_output(command, text=True, timeout=120)
    if not named and not said.startswith("no NVRTC"):
        pytest.skip("the loader finds an NVRTC by itself")
    assert expected in said


IMPORT = """
import fkl_jax
with open("/proc/self/maps") as f:
    maps = f.read()
print([name for name in ("libcuda.so", "libnvrtc") if name in maps])
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_import_opens_neither_driver_nor_compiler():
    command = [sys.executable, "-P", "-c", IMPORT]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    said = subprocess.check_output(command, text=True, timeout=120, env=environment)
    assert said.strip() == "[]"
