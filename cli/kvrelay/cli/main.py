"""The `kvrelay` command. Nothing heavy is imported before the command is known."""

from __future__ import annotations

import os
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
            return _call(ROLES[args[0]], args[1:])
        options = build_parser().parse_args(args)
        status = _call(options.run, options)
        sys.stdout.flush()  # here, where a reader that has gone can still be told from a failure
        return status
    except ServeError as err:
        print(f"kvrelay: error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 141  # what a shell shows for SIGPIPE


def _call(target: str, argument: Any) -> int:
    module, function = target.split(":")
    run: Callable[[Any], int | None] = getattr(import_module(module), function)
    return run(argument) or 0


if __name__ == "__main__":
    sys.exit(main())
