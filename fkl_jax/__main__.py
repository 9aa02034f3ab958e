"""Command line: `python -m fkl_jax doctor`."""

import argparse
import sys
from collections.abc import Sequence

from . import _doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command; usage and status 2 for any other."""
    parser = argparse.ArgumentParser(prog="python -m fkl_jax")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="versions, backends and why not, settings of this machine"
    )
    parser.parse_args(argv)
    print(_doctor.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
