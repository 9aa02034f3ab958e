"""What a fresh clone relies on: README commands, versions, and a harmless import."""

import importlib.metadata
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

import fkl_jax
from fkl_jax import _config, _program, _trace

ROOT = pathlib.Path(__file__).parents[1]


def readme_command(name):
    """The code block that follows the marker `<!-- command: name -->`."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(
        rf"<!-- command: {name} -->\n+```(?:bash|sh)?\n(.+?)\n```", text, re.DOTALL
    )
    assert len(found) == 1, f"README.md must have one command block called {name}"
    return found[0]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", ["example", "tests"])
def test_readme_commands_are_one_command_each(name):
    command = readme_command(name)
    assert "\n" not in command.replace("\\\n", " ")
    words = shlex.split(command.replace("\\\n", " "))
    for word in words:
        if word.endswith(".py"):
            assert (ROOT / word).is_file()
    extras = next(w for w in words if w.startswith(".["))[2:-1].split(",")
    assert set(extras) <= set(project()["optional-dependencies"])
    subprocess.run(["bash", "-n", "-c", command], check=True)


def test_readme_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_readme_is_short_and_names_every_variable():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 250
    for variable in _config.VARIABLES:
        assert f"`{variable.name}`" in text


def test_one_version():
    assert fkl_jax.__version__ == project()["version"]
    assert fkl_jax.__version__ == importlib.metadata.version("fkl_jax")
    assert f"## {fkl_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_upper_bound_on_jax():
    for requirement in project()["dependencies"]:
        assert "<" not in requirement, f"{requirement} would hold users back"


def test_tests_of_the_layers_run_where_the_suite_is_installed():
    """They are skipped without Flax and Equinox, so the `test` extra brings both."""
    extras = project()["optional-dependencies"]
    assert "fkl_jax[flax,equinox]" in extras["test"]
    assert extras["flax"] and extras["equinox"]


def test_licence_is_the_full_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_documented_primitives_are_the_supported_ones():
    page = (ROOT / "docs" / "adding-a-score-mod.md").read_text()

    def listed(marker):
        block = page.split(f"<!-- {marker}:begin -->")[1]
        return set(re.findall(r"`(\w+)`", block.split(f"<!-- {marker}:end -->")[0]))

    assert listed("primitives") == set(_program.SUPPORTED_PRIMITIVES)
    assert listed("array-primitives") == set(_trace._ARRAY_OPS)


IMPORT_CHECK = """
import logging, os, sys, jax
from jax._src import xla_bridge  # no public question tells without starting one

files, handlers = os.listdir(), list(logging.getLogger().handlers)
modules = set(sys.modules)
import fkl_jax
assert not xla_bridge.backends_are_initialized(), "importing started a JAX backend"
assert os.listdir() == files, "importing made files"
assert logging.getLogger().handlers == handlers, "importing added a log handler"
unwanted = {"matplotlib", "tqdm", "subprocess", "pytest", "flax", "equinox"}
extra = unwanted & (set(sys.modules) - modules)
assert not extra, f"importing pulled in {extra}"
"""


def test_import_has_no_side_effects(tmp_path):
    # -P: the installed package, not the folder the tests happen to run in.
    command = [sys.executable, "-P", "-c", IMPORT_CHECK]
    subprocess.run(command, check=True, cwd=tmp_path)


def test_type_checkers_may_read_the_annotations():
    assert (pathlib.Path(fkl_jax.__file__).parent / "py.typed").exists()
