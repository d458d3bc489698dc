"""Chat templates: Jinja in a sandbox, with what model publishers' templates expect to find there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.core.errors import InvalidRequestError, ModelLoadError


class ChatTemplate:
    """A compiled template. Renders a conversation up to where the assistant goes on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Raises:
            ModelLoadError: the template is no valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise ModelLoadError(f"chat template, line {err.lineno}: {err.message}") from err
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return the prompt of a conversation of (role, content).

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=conversation, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as err:
            roles = ", ".join(dict.fromkeys(role for role, _ in messages))  # there may be a million
            raise InvalidRequestError(f"the model's chat template refuses messages of roles {roles}: {err}") from err


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Unlike Jinja's own filter this one does not escape HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates want the local date
