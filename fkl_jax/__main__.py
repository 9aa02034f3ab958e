"""Command line: `python -m fkl_jax doctor` and `python -m fkl_jax warmup`."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command; usage and status 2 for any other."""
    parser = argparse.ArgumentParser(prog="python -m fkl_jax")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="versions, backends and why not, settings of this machine"
    )
    warmup = commands.add_parser(
        "warmup", help="compile CUDA kernels into the cache, in parallel"
    )
    warmup.add_argument(
        "--shapes", metavar="FILE", help="JSON list of calls; default: common ones"
    )
    warmup.add_argument(
        "--arch",
        metavar="sm_XX",
        help="compile for this architecture; default: the GPU of this machine",
    )
    warmup.add_argument("--workers", type=int, help="processes; default: one per core")
    arguments = parser.parse_args(argv)
    if arguments.command == "warmup":
        return _warmup(arguments.shapes, arguments.arch, arguments.workers)
    from . import _doctor

    print(_doctor.report())
    return 0


def _warmup(shapes_file: str | None, arch: str | None, workers: int | None) -> int:
    from . import _config, _ffi, _warmup

    if reason := _ffi.register():
        print(f"cannot compile: {reason}", file=sys.stderr)
        return 1
    try:
        arch = arch or _warmup.local_arch()
        shapes = (
            _warmup.read_shapes(shapes_file) if shapes_file else _warmup.common_shapes()
        )
        count, failures = _warmup.run(shapes, arch, workers)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"cannot compile: {error}", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(f"{count} sources for {arch} in {_config.cache_dir()}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
