"""Train the example on a GPU and on the CPU, and compare the losses step by step.

    python benchmarks/compare_training.py --output benchmarks/results/training
    python benchmarks/compare_training.py --runs cpu:ffi,cpu:xla --steps 20

The model, its text and the order of its batches are those of examples/train_char_lm.py;
products are in full float32, so that the devices differ by rounding only. Training
makes small differences grow: the bounds are on the curve, not on the last bit.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

import fkl_jax

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "train_char_lm.py"
# Relative differences of the losses: of the first ten steps, and of all on average.
MAX_FIRST, MAX_MEAN = 1e-5, 1e-3


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("train_char_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def losses_of(run: str, steps: int) -> tuple[list[float], float, str]:
    """Losses, seconds and the device of a run like "cuda:ffi"."""
    example = load_example()
    platform, implementation = run.split(":")
    device = jax.devices(platform)[0]
    model = example.ModelConfig(implementation=implementation)
    config = example.TrainConfig()
    config = dataclasses.replace(
        config, num_steps=steps, num_warmup_steps=min(50, steps), eval_every=steps
    )
    text = example.load_text(example.stdlib_folder())
    start = time.perf_counter()
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        _, losses, _ = example.train(*text, model, config)
    return losses, time.perf_counter() - start, device.device_kind


def differences(one: list[float], other: list[float]) -> dict[str, float]:
    """Relative differences of two curves."""
    a, b = np.asarray(one), np.asarray(other)
    relative = np.abs(a - b) / b
    return {
        "first": float(relative[:10].max()),
        "mean": float(relative.mean()),
        "max": float(relative.max()),
    }


def verdict(found: dict[str, float], losses: list[float]) -> bool:
    """True if the curves match, and go down."""
    falls = losses[-1] < 0.8 * losses[0]
    return falls and found["first"] <= MAX_FIRST and found["mean"] <= MAX_MEAN


def shown_steps(count: int) -> list[int]:
    return sorted(
        {s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if s < count} | {count}
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare the example's losses on two devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--runs", default="cuda:ffi,cpu:ffi", help="two of PLATFORM:IMPLEMENTATION"
    )
    parser.add_argument("--output", type=pathlib.Path, help="stem of .md and .jsonl")
    args = parser.parse_args(argv)
    runs = args.runs.split(",")
    if len(runs) != 2:
        parser.error("--runs names two runs")
    results = [losses_of(run, args.steps) for run in runs]
    (one, seconds, device), (other, other_seconds, other_device) = results
    found = differences(one, other)
    passed = verdict(found, one)
    words = " ".join(["python", "benchmarks/compare_training.py", *sys.argv[1:]])
    lines = [
        f"{runs[0]} on {device} ({seconds:.0f} s) against {runs[1]} on {other_device} "
        f"({other_seconds:.0f} s); JAX {jax.__version__}, fkl_jax "
        f"{fkl_jax.__version__}. `{words}`",
        "",
        f"Bits per byte. Relative difference: {found['first']:.1e} at most in the "
        f"first ten steps (<= {MAX_FIRST:g}), {found['mean']:.1e} on average (<= "
        f"{MAX_MEAN:g}), {found['max']:.1e} at most: "
        f"{'pass' if passed else '**FAIL**'}.",
        "",
        f"| step | {runs[0]} | {runs[1]} |",
        "|---|---|---|",
        *(
            f"| {s} | {one[s - 1]:.5f} | {other[s - 1]:.5f} |"
            for s in shown_steps(len(one))
        ),
    ]
    text = "\n".join(lines)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".md").write_text(text + "\n")
        records = [
            {"run": r, "losses": x[0]} for r, x in zip(runs, results, strict=True)
        ]
        args.output.with_suffix(".jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
