"""Whether roles would take their options and the environment, asked before any of them is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvrelay.cli.children import Command
from kvrelay.core.settings import CommonSettings, load
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.router.settings import RouterSettings

_SETTINGS: Mapping[str, type[CommonSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


def check(commands: Iterable[Command]) -> None:
    """Read the settings that each process would read.

    Raises:
        SettingsError: one of them would refuse an option or a variable; names it, the value and what is allowed.
    """
    # Those that differ in their names only, which may be many, are one case.
    cases = {(one.role, *(word for word in one.options if word != one.name)): one for one in commands}
    for one in cases.values():
        load(_SETTINGS[one.role], one.options, prog=f"kvrelay {one.role}")
