"""Whether a library that kernels can do without is there and loads."""

from __future__ import annotations

import functools
import logging
from importlib import import_module

log = logging.getLogger(__name__)


@functools.cache
def import_refuses(module: str, package: str) -> str | None:
    """Return None, or the reason `module` cannot be imported; `package` is what a user would install.

    Imports it: a package whose needs are missing, or whose libraries fit another machine, is found but does not load.
    Whoever installed that wants to know, so it is a warning; a package that is not there is none.
    """
    try:
        import_module(module)
    except ModuleNotFoundError as err:
        if err.name is not None and (module == err.name or module.startswith(f"{err.name}.")):
            return f"package {package} is not installed"
        return _warned(package, err)
    except (ImportError, OSError, RuntimeError, TypeError) as err:  # the last: of a library that checks others
        return _warned(package, err)
    return None


def _warned(package: str, err: Exception) -> str:
    reason = f"package {package} does not load: {err}"
    log.warning("%s", reason)
    return reason
