"""The `shardfield` command: one subcommand per line of COMMANDS."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Subcommand -> module with `add_arguments(parser)` and `run(arguments) -> exit status`, and the
# line that `shardfield --help` shows.
COMMANDS = {
    "partition": ("shardfield.graph._command", "cut a mesh file into pieces with ghost layers"),
    "selftest": (
        "shardfield.selftest._command",
        "check PyTorch's operators on sharded inputs against the plain ones",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Errors that the user can mend are one line, without a traceback."""
    parser = argparse.ArgumentParser(prog="shardfield", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    modules = {}
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in given[:1]:  # the others are not even imported
            modules[name] = importlib.import_module(module_name)
            modules[name].add_arguments(subparser)
    parsed = parser.parse_args(given)
    try:
        return int(modules[parsed.command].run(parsed))
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        print(f"shardfield {parsed.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
