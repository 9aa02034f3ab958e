"""The Python blocks of the guides run as they stand."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
NEEDS = {"flax", "equinox"}


def test_migration_guide_runs():
    for library in NEEDS:
        pytest.importorskip(library)
    page = DOCS / "migrating.md"
    text = page.read_text()
    blocks = list(
        re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    )
    assert len(blocks) >= 10
    names = {"__name__": "guide"}
    for block in blocks:
        # Line numbers of the page in a traceback.
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(page), "exec")
        exec(code, names)
