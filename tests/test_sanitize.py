"""What `sanitize.py` runs are the kernels that it is meant to run."""

import argparse
import subprocess
import sys

import cuda_calls
import pytest
import sanitize

from fkl_jax._tuning import choose_plan, tune_key

HOPPER = cuda_calls.gpu("sm_90a")


def functions(case):
    """Of the plans of the forward and the backward on compute capability 9.0."""
    found = []
    for call in cuda_calls.calls(case):
        operands = call.spec.named(call.avals[: len(call.spec.operands)])
        key = tune_key(call.spec, operands, call.results, merged_query=True, gpu=HOPPER)
        found += choose_plan(key).functions
    return found


@pytest.mark.parametrize("case", sanitize.TILED, ids=str)
def test_cases_of_both_families_reach_the_newer_one(case):
    assert {"forward_sm90", "backward_keys_sm90"} <= set(functions(case))


def test_portable_cases_reach_every_other_kernel():
    found = {name for case in sanitize.PORTABLE for name in functions(case)}
    assert "backward_keys_sm90" not in found
    assert found >= {"forward_sm80", "backward_keys_sm80", "backward_queries_sm80"}
    found = {name for case in sanitize.DECODING for name in functions(case)}
    assert found >= {"decode_sm80", "combine_splits", "backward_keys_sm90"}
    assert "forward_sm90" not in found


def test_a_persistent_kernel_is_among_them():
    plans = [
        call.glue(HOPPER).launch.kernels[0]
        for case in sanitize.TILED
        for call in cuda_calls.calls(case)[:1]
    ]
    assert {plan.max_blocks is None for plan in plans} == {True, False}


def test_kernels_are_found_by_their_names():
    for case in sanitize.CASES["sm80"]:
        for call in cuda_calls.calls(case):
            for kernel in call.glue(HOPPER).launch.kernels:
                assert any(part in kernel.name for part in sanitize.KERNELS), kernel


def run(tmp_path, text, status):
    """What becomes of a tool that prints a text and ends with a status."""
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    tool.chmod(0o755)
    args = argparse.Namespace(
        sanitizer=str(tool), only="", logs=tmp_path, cache=str(tmp_path), timeout=2.0
    )
    return sanitize.run("memcheck", "sm80", 0, 1, args)


def test_a_tool_is_clean_only_if_it_says_so(tmp_path):
    summary = "========= ERROR SUMMARY: 0 errors"
    assert run(tmp_path, f"plain: 0.1 s\n{summary}", 0)["clean"]
    assert run(tmp_path, f"plain: 0.1 s\n{summary}", 0)["calls"] == 1
    assert not run(tmp_path, "Device not supported", 0)["clean"]
    bad = run(tmp_path, "========= ERROR SUMMARY: 3 errors", 9)
    assert not bad["clean"] and bad["summary"] == "ERROR SUMMARY: 3 errors"
    assert "**NOT CLEAN**" in sanitize.together([bad])[-1]
    late = run(tmp_path, "plain: 0.1 s", "$(sleep 5)")
    assert not late["clean"] and late["summary"] == "stopped after 2.0 s"


def test_the_calls_run():
    command = [sys.executable, sanitize.__file__, "--tools", "none", "--parts", "1"]
    command += ["--only", "H=40", "--families", "sm80"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| none | sm80 | 1 |" in done.stdout
