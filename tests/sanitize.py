"""Run a selection of calls, values checked, under the tools of compute-sanitizer.

    python tests/sanitize.py                                  # all four, both families
    python tests/sanitize.py --output benchmarks/results/sanitizers.md
    python tests/sanitize.py --tools racecheck --only decode
    python tests/sanitize.py --tools none                     # the calls alone

Each call is a forward and its gradients, held to the float64 oracle. The calls run
first without a tool, which also compiles the kernels; then each tool has processes of
its own, all at the same time. Every buffer is an allocation of its own, so that a tool
sees where it ends and which of it was never written. Only our kernels are looked at.
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))  # `python -P` leaves it out

from cases import Case, check_case  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FAMILIES = ("sm80", "sm90")
KERNELS = ("forward", "decode", "combine", "backward")  # parts of all names
SETTINGS = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
}


def half(name: str, head_dim: int = 64, **changes: Any) -> Case:
    """A case that the kernels of both families can take."""
    return Case(
        **{
            "name": name,
            "batch": (1,),
            "q_seq_len": 140,
            "kv_seq_len": 200,
            "num_q_heads": 2,
            "num_kv_heads": 1,
            "head_dim": head_dim,
            "value_head_dim": head_dim,
            "dtype": "bfloat16",
            **changes,
        }
    )


def decode(name: str, **changes: Any) -> Case:
    return half(
        name, **{"q_seq_len": 1, "kv_seq_len": 1100, "num_q_heads": 4, **changes}
    )


# Tiled kernels of either family.
TILED = [
    half("causal", causal="bottom_right"),
    half("causal, H=128", 128, causal="top_left"),
    half("causal, H=96", 96, causal="bottom_right", dtype="float16"),
    half("H=256", 256, q_seq_len=70),
    half("H=128, Hv=64", 128, value_head_dim=64),
    half("more tiles than processors", batch=(33,), num_q_heads=4, kv_seq_len=140,
         causal=True),
    half("window, lengths, padding", 128, mask_mods=("window",), lengths="qk",
         poison=True),
    half("segment ids", segment_ids=True, causal="bottom_right", poison=True),
    half("block mask", 128, block_mask="holes", block_q=64, block_kv=16),
    half("bias", bias="NTS", causal="bottom_right"),
    half("sinks and soft cap", 128, sinks=True, score_mods=("soft_cap",)),
    half("captured arrays", score_mods=("alibi", "captured_table"),
         causal="bottom_right"),
    half("offsets, traced scale", offsets="scalar", causal=True, scale=0.3,
         traced_scale=True),
    half("H=40", 40, causal="bottom_right"),
    half("rows off 16 bytes", 60, causal="bottom_right"),
]  # fmt: skip
# Backward kernels of the portable family on every GPU.
PORTABLE = [
    half("H=24", 24, causal="bottom_right"),
    half("float32", 40, dtype="float32", q_seq_len=67, causal="bottom_right"),
    half("deterministic", deterministic=True, causal="bottom_right"),
    half("deterministic, H=128", 128, deterministic=True, segment_ids=True),
    half("odd head dims", 23, value_head_dim=37, q_seq_len=67, kv_seq_len=131),
]  # fmt: skip
# One forward kernel for all; its backward has a family.
DECODING = [
    decode("decode, split"),
    decode("decode, H=128", head_dim=128, value_head_dim=128, lengths="k", poison=True),
    decode("decode, 5 rows", q_seq_len=5, causal="bottom_right",
           score_mods=("alibi", "soft_cap"), sinks=True),
    decode("decode, window", mask_mods=("window_last",), offsets="batch", batch=(2,)),
    decode("decode, one part", kv_seq_len=33, head_dim=40),
]  # fmt: skip
CASES = {"sm80": [*TILED, *PORTABLE, *DECODING], "sm90": [*TILED, *DECODING]}


def run_calls(family: str, args: argparse.Namespace) -> None:
    """In this process, those of one part."""
    if family == "sm80":
        os.environ["FKL_JAX_CUDA_FAMILY"] = family
    import jax

    device = jax.devices("cuda" if args.need_gpu else None)[0]
    chosen = [case for case in CASES[family] if args.only in case.name]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        for case in chosen[args.part :: args.parts]:
            start = time.perf_counter()
            check_case(case, "ffi")
            print(f"{case.name}: {time.perf_counter() - start:.1f} s", flush=True)


def command(
    tool: str, family: str, part: int, parts: int, args: argparse.Namespace
) -> list[str]:
    python = [sys.executable, "-P", __file__, "--calls", family]
    python += ["--only", args.only, "--part", str(part), "--parts", str(parts)]
    if tool == "none":
        return python
    filters = [f"kernel_substring={name}" for name in KERNELS]
    filters = [word for f in filters for word in ("--kernel-name", f)]
    more = ["--racecheck-report", "all"] if tool == "racecheck" else []
    return [
        *(args.sanitizer, "--tool", tool, "--error-exitcode", "9", *filters, *more),
        # JAX asks for what a device may not have; that is no error of a kernel.
        *("--report-api-errors", "no", *python, "--need-gpu"),
    ]


def run(
    tool: str, family: str, part: int, parts: int, args: argparse.Namespace
) -> dict[str, Any]:
    """What became of one process; its output goes to a file of the logs."""
    start = time.perf_counter()
    path = args.logs / f"{tool}_{family}_{part}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command(tool, family, part, parts, args),
            env={"FKL_JAX_CACHE_DIR": args.cache, **os.environ, **SETTINGS},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(args.timeout)
            ended = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, ended = -1, f"stopped after {args.timeout} s"
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
            process.wait()
    output = path.read_text(errors="replace")
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    return {
        "tool": tool,
        "family": family,
        "calls": len(re.findall(r"^.*: [\d.]+ s$", output, re.M)),
        "seconds": time.perf_counter() - start,
        "summary": summary[-1] if summary else ended,
        # Without its summary a tool has not looked at anything.
        "clean": status == 0 and (tool == "none" or bool(summary)),
        "output": output,
    }


def together(results: list[dict[str, Any]]) -> list[str]:
    """One line of Markdown per tool and family."""
    lines = ["| tool | family | calls | seconds | |", "|---|---|---|---|---|"]
    for tool, family in dict.fromkeys((r["tool"], r["family"]) for r in results):
        own = [r for r in results if (r["tool"], r["family"]) == (tool, family)]
        said = "; ".join(dict.fromkeys(r["summary"] for r in own))
        clean = "clean" if all(r["clean"] for r in own) else "**NOT CLEAN**"
        lines.append(
            f"| {tool} | {family} | {sum(r['calls'] for r in own)} "
            f"| {max(r['seconds'] for r in own):.0f} | {clean}: {said} |"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run calls under compute-sanitizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tools", default=",".join(TOOLS), help="by commas, or none")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--only", default="", help="calls whose name has this")
    parser.add_argument(
        "--parts", type=int, default=2, help="processes per tool and family"
    )
    parser.add_argument("--timeout", type=float, default=300, help="s of a process")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for all output")
    parser.add_argument("--output", type=pathlib.Path, help="file for the table")
    parser.add_argument("--calls", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--need-gpu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.calls:
        run_calls(args.calls, args)
        return 0
    results: list[dict[str, Any]] = []
    tools = [tool for tool in args.tools.split(",") if tool != "none"]
    with contextlib.ExitStack() as stack:
        args.cache = stack.enter_context(tempfile.TemporaryDirectory())
        if args.logs is None:
            args.logs = pathlib.Path(args.cache)
        args.logs.mkdir(parents=True, exist_ok=True)
        compilers = max(args.parts, (os.cpu_count() or 2) // 2)
        for group, parts in ((["none"], compilers), (tools, args.parts)):
            jobs = [
                (tool, family, part, parts, args)
                for tool in group
                for family in args.families.split(",")
                for part in range(parts)
            ]
            with concurrent.futures.ThreadPoolExecutor(len(jobs) or 1) as pool:
                results += pool.map(lambda job: run(*job), jobs)
            if not all(r["clean"] for r in results):
                break  # what fails by itself needs no tool
    for r in results:
        if not r["clean"]:
            print(f"--- {r['tool']} {r['family']}\n{r['output'][-6000:]}")
    import jax

    words = " ".join(["python", "tests/sanitize.py", *sys.argv[1:]])
    head = f"{jax.devices()[0].device_kind}; JAX {jax.__version__}. `{words}`"
    text = "\n".join([head, "", *together(results)])
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")
    return 0 if all(r["clean"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
