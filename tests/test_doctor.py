"""`python -m fkl_jax doctor` always answers, whatever is broken."""

import os
import subprocess
import sys

import pytest

from fkl_jax import __main__, _backends, _config, _doctor

SECTIONS = (
    "versions",
    "platform",
    "cpu kernels",
    "gpu",
    "backends",
    "cache",
    "environment variables",
)


def run_doctor(*arguments, **environment):
    # -P: the installed package, not the folder the tests happen to run in.
    return subprocess.run(
        [sys.executable, "-P", "-m", "fkl_jax", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def section(report, title):
    blocks = {block.split("\n", 1)[0]: block for block in report.split("\n\n")}
    return blocks[title]


def test_command_prints_every_section():
    done = run_doctor("doctor")
    assert done.returncode == 0, done.stderr
    assert tuple(b.split("\n", 1)[0] for b in done.stdout.split("\n\n")) == SECTIONS
    assert "Traceback" not in done.stdout + done.stderr
    assert "not known" not in done.stdout


def test_names_every_backend_and_the_choice():
    text = section(_doctor.report(), "backends")
    for name, _, _ in _backends.report():
        assert name in text
    assert "implementation=None" in text


def test_names_every_variable_of_ours(monkeypatch):
    monkeypatch.setenv("FKL_JAX_CACHE_DIR", "/nowhere/at/all")
    report = _doctor.report()
    for variable in _config.VARIABLES:
        assert variable.name in section(report, "environment variables")
    assert "/nowhere/at/all" in section(report, "cache")


def test_missing_extension_is_a_line_not_a_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "fkl_jax._ext", None)
    report = _doctor.report()
    assert "not known: ModuleNotFoundError" in section(report, "cpu kernels")
    assert "yes" in section(report, "backends")


def test_broken_part_does_not_hide_the_others(monkeypatch):
    def broken():
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(_backends, "report", broken)
    report = _doctor.report()
    expected = "not known: RuntimeError: first line second line"
    assert expected in section(report, "backends")
    assert "FKL_JAX_CACHE_DIR" in section(report, "environment variables")


def test_jax_that_cannot_start_is_reported():
    done = run_doctor("doctor", JAX_PLATFORMS="no_such_platform")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "not known: RuntimeError" in section(done.stdout, "platform")


@pytest.mark.parametrize("arguments", [[], ["docter"], ["doctor", "now"]])
def test_wrong_command_line_gives_usage_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        __main__.main(arguments)
    assert exit_info.value.code == 2
    assert "usage: python -m fkl_jax" in capsys.readouterr().err


def test_cache_folder_states(tmp_path):
    assert _doctor._folder_state(tmp_path) == "exists, writable"
    assert _doctor._folder_state(tmp_path / "a" / "b") == "will be made when needed"
    file = tmp_path / "file"
    file.write_text("")
    assert "NOT a writable folder" in _doctor._folder_state(file)
    assert "cannot be made" in _doctor._folder_state(file / "below")
