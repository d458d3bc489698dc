"""Whether a library that kernels can do without is there and loads."""

from __future__ import annotations

import functools
from importlib import import_module


@functools.cache
def import_refuses(module: str, package: str) -> str | None:
    """Return None, or the reason `module` cannot be imported; `package` is what a user would install.

    Imports it: a package whose needs are missing, or whose libraries fit another machine, is found but does not load.
    """
    try:
        import_module(module)
    except ModuleNotFoundError as err:
        if err.name is not None and (module == err.name or module.startswith(f"{err.name}.")):
            return f"package {package} is not installed"
        return f"package {package} does not load: {err}"
    except (ImportError, OSError, RuntimeError) as err:
        return f"package {package} does not load: {err}"
    return None
