"""The `kvrelay` command. Nothing heavy is imported before the command is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kvrelay.cli.parser import ROLES, build_parser
from kvrelay.core.errors import ServeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; expected failures are one line on stderr and exit code 1."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args and args[0] in ROLES:
            return _call(f"{ROLES[args[0]]}:main", args[1:])
        options = build_parser().parse_args(args)
        return _call(options.run, options)
    except ServeError as err:
        print(f"kvrelay: error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _call(target: str, argument: Any) -> int:
    module, function = target.split(":")
    run: Callable[[Any], int | None] = getattr(import_module(module), function)
    return run(argument) or 0


if __name__ == "__main__":
    sys.exit(main())
