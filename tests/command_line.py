"""The command line and the settings as text, for the golden file and the README's table.

After a change on purpose: python tests/command_line.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvrelay.cli.parser import build_parser
from kvrelay.core.settings import CommonSettings
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.router.settings import RouterSettings
from repo import ROOT

GOLDEN = ROOT / "tests" / "unit" / "golden" / "cli.txt"
README = ROOT / "README.md"
TABLE_BEGIN, TABLE_END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"
ROLES: dict[str, type[CommonSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


def describe() -> str:
    """Return one line per option of every command, independent of how argparse words its help."""
    lines = list(_commands("kvrelay", build_parser()))
    for role, settings in ROLES.items():
        lines += [
            f"kvrelay {role} --{name.replace('_', '-')}  [{_default(settings, name)}]  {field.description}"
            for name, field in settings.model_fields.items()
        ]
    return "\n".join(lines) + "\n"


def settings_table() -> str:
    """Return the settings of all roles as a Markdown table."""
    names = list(dict.fromkeys(name for settings in ROLES.values() for name in settings.model_fields))
    rows = ["| setting | default | router | prefill | decode | what it is |", "|---|---|---|---|---|---|"]
    for name in names:
        having = {role: settings for role, settings in ROLES.items() if name in settings.model_fields}
        defaults = list(dict.fromkeys(_default(settings, name) for settings in having.values()))
        marks = " | ".join("x" if role in having else "" for role in ROLES)
        text = _what(name, having).replace("|", "\\|")
        rows.append(f"| `{name}` | {' or '.join(defaults)} | {marks} | {text} |")
    return "\n".join(rows) + "\n"


def readme_table() -> str:
    """Return the table that the README holds now."""
    text = README.read_text()
    return text[text.index(TABLE_BEGIN) + len(TABLE_BEGIN) : text.index(TABLE_END)]


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield f"{name} {word}"
                yield from _commands(f"{name} {word}", inner)
        elif not isinstance(action, argparse._HelpAction):
            option = ", ".join(action.option_strings) or str(action.metavar)
            value = f" {action.metavar or action.choices or ''}".rstrip() if action.option_strings else ""
            yield f"{name} {option}{value}  [{action.default}]  {action.help}"


def _what(name: str, having: dict[str, type[CommonSettings]]) -> str:
    """Return the description; where roles differ, each with its roles."""
    roles: dict[str, list[str]] = {}
    for role, settings in having.items():
        roles.setdefault(settings.model_fields[name].description or "", []).append(role)
    if len(roles) == 1:
        return next(iter(roles))
    return "; ".join(f"{', '.join(those)}: {text.replace(';', ',')}" for text, those in roles.items())


def _default(settings: type[CommonSettings], name: str) -> str:
    field = settings.model_fields[name]
    if field.is_required():
        return "required"
    return "empty" if field.default == "" else str(field.default)


if __name__ == "__main__":
    GOLDEN.write_text(describe())
    before, _, rest = README.read_text().partition(TABLE_BEGIN)
    README.write_text(before + TABLE_BEGIN + settings_table() + TABLE_END + rest.partition(TABLE_END)[2])
