"""The benchmark runs from end to end and prints what it should; times mean nothing."""

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
