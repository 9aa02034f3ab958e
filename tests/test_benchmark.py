"""The benchmark runs from end to end and prints what it should; times mean nothing."""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def records():
    command = [sys.executable, str(BENCHMARKS / "bench_cpu.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_names_the_machine(records):
    facts = records[0]["machine"]
    assert {"cpu", "cores", "isa", "jax", "load", "others"} <= set(facts)
    assert "not known" not in facts["isa"]


def test_every_promise_has_a_row(records):
    rows = [record["what"] for record in records[1:]]
    for words in (
        "forward causal: jax.nn",
        "forward full: jax.nn",
        "gradient causal: jax.nn",
        "gradient full: jax.nn",
        "forward full: float32 / bf16",
        "forward full: with a user's",
        "random block mask",
        "share of the measured read bandwidth",
        "forward, 1024 tokens: peak memory",
        "gradient, 1024 tokens: peak memory",
    ):
        assert any(words in row for row in rows), words


def test_quick_run_gives_no_verdict(records):
    assert all(record["passed"] is None for record in records[1:])


def test_verdicts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_cpu import Promise, judge, ratio_row

    assert judge(6.0, at_least=6.0) == (">= 6", True)
    assert judge(1.36, at_most=1.35) == ("<= 1.35", False)
    assert judge(1.0) == ("", None)
    seconds = {"plain": 1.0, "mod": 1.25}
    faster = Promise(what="", reference="mod", ours="plain", at_least=1.3)
    cost = Promise(what="", reference="plain", ours="mod", at_most=1.3)
    assert (ratio_row(faster, seconds).figure, ratio_row(cost, seconds).figure) == (
        1.25,
        1.25,
    )
    assert not ratio_row(faster, seconds).passed
    assert ratio_row(cost, seconds).passed


@pytest.fixture(name="bench_gpu")
def _bench_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_gpu

    return bench_gpu


def test_targets_are_of_workloads_that_exist(bench_gpu):
    from targets import TARGETS

    names = [work.name for work in bench_gpu.WORKLOADS]
    assert len(set(names)) == len(names)
    for target in itertools.chain(*TARGETS.values()):
        assert target.workload in names, target
        assert target.against in ("", *names), target


def test_targets_of_a_measured_workload(bench_gpu, monkeypatch):
    """Made-up times: the window takes a tenth of the causal call of the same rounds."""
    asked = []

    def seconds_each(calls, rounds, fill_ms):
        asked.extend(calls)
        return {n: 1e-3 if n == "fkl_jax" else 1e-2 for n in calls}

    monkeypatch.setattr(bench_gpu, "seconds_each", seconds_each)
    monkeypatch.setattr(bench_gpu, "jax_call", lambda *args, **options: None)
    monkeypatch.setattr(bench_gpu, "family", lambda args: "sm80")
    args = argparse.Namespace(alone=True, torch=False, rounds=1, fill=1.0)
    rows = [
        bench_gpu.measure(work, args)
        for work in bench_gpu.WORKLOADS
        if work.name in ("window 1024, 8k", "H=128 8k full", "8 documents as a batch")
    ]
    assert "fkl_jax: H=128 8k causal" in asked
    assert all(list(row["rate"]) == ["fkl_jax"] for row in rows)
    full, window, batch = (row["required"] for row in rows)
    assert full == [{"text": ">= 330", "passed": True}]
    text = "0.10 times the time of H=128 8k causal, <= 0.2"
    assert window == [{"text": text, "passed": True}]
    assert batch == []
    facts = dict.fromkeys(
        ["gpu", "driver", "nvrtc", "jax", "fkl_jax", "family", "rounds", "command"], "x"
    )
    lines = bench_gpu.markdown(rows, facts).splitlines()
    assert lines[-2].endswith(f"| {text}: pass |")
    assert lines[-1].endswith("|  |  |")


def test_overhead_benchmark_runs():
    command = [sys.executable, str(BENCHMARKS / "bench_overhead.py"), "--quick"]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 8 and all(row["passed"] is None for row in rows)
    assert rows[-1]["what"].endswith("with new values") and rows[-1]["figure"] == 0


def test_missed_targets(bench_gpu):
    from targets import Target

    rate = Target(workload="", at_least=3.8)
    assert rate.verdict(3.8) and not rate.verdict(3.79)
    cost = Target(workload="", at_most=1.1, against="plain")
    assert cost.verdict(1.1) and not cost.verdict(1.11)
    assert cost.words(1.11) == "1.11 times the time of plain, <= 1.1"


def test_loss_curves(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compare_training as c

    curve = [8.0, 7.0, 6.0, *[5.0] * 20]
    assert c.verdict(c.differences(curve, curve), curve)
    off = [*curve[:15], *[x * 1.02 for x in curve[15:]]]
    found = c.differences(curve, off)
    assert found["first"] == 0.0 and found["max"] > 0.019
    assert not c.verdict(found, curve), "drifts apart"
    flat = [8.0] * 20
    assert not c.verdict(c.differences(flat, flat), flat), "learns nothing"
    assert c.shown_steps(60) == [1, 2, 5, 10, 20, 50, 60]


def test_scaling_measures_strong_and_weak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_scaling

    assert bench_scaling.counts(1) == [1] and bench_scaling.counts(6) == [1, 2, 4, 6]
    small = bench_scaling.Workload(
        name="", batch=1, seq_len=16, num_q_heads=4, num_kv_heads=1, head_dim=8,
        divided="heads", dtype="float32",
    )  # fmt: skip
    for weak in (False, True):
        times = bench_scaling.measure(small, 2, weak, rounds=1)
        assert len(times) == 2 and min(times) > 0
    assert bench_scaling.measure(small, 8, weak=False, rounds=1) is None
