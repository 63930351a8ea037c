"""Command-line options generated from the fields of a configuration class, and how help texts show them.

Inside: `with_config_options`, `given_options`, `Command`, `Group`, `meaning`, `default_text`,
`markdown_table`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import attrs
import typer
from typer.core import TyperCommand, TyperGroup

from itm_fast import config as settings

__all__ = ["Command", "Group", "default_text", "given_options", "markdown_table", "meaning", "with_config_options"]

_METAVARS = {int: "N", float: "X", str: "NAME"}


class _PlainFlags:
    """Mixin for commands: flags are shown without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command whose help shows flags without a value, and each paragraph of its docstring at any width."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (self.help or "").split("\n\n"))


class Group(_PlainFlags, TyperGroup):
    """A group of commands whose help shows flags without a value."""


def with_config_options(
    config: type, replaced: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one option per field of `config`, as a decorator; the value is None unless the option is given.

    The command takes them as keyword arguments `**values`, beside its own named parameters. Fields in `replaced` get no
    option. The former name of a field is a hidden option.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        names = [
            (name, field, hidden)
            for present, field in settings.fields_of(config).items()
            for name, hidden in ((present, False), (field.metadata["former"], True))
            if name is not None and present not in replaced
        ]
        generated = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_annotation(config, field, name, hidden=hidden),
            )
            for name, field, hidden in names
        ]
        parameters = [*generated, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the command line contains."""
    return {name: value for name, value in values.items() if value is not None}


def _annotation(config: type, field: attrs.Attribute[Any], name: str, *, hidden: bool) -> Any:
    plain, _ = settings.type_of(config, field.name)
    flag = "--" + name.replace("_", "-")
    turned_off = f"; --no-{flag[2:]} turns it off" if field.default is True else ""
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if plain is bool else flag,
        help=f"{meaning(field)} ({default_text(field)}{turned_off})".replace(" ()", ""),
        show_default=False,
        metavar=field.metadata["metavar"] or _METAVARS.get(plain),
        rich_help_panel=field.metadata["group"],
        hidden=hidden,
    )
    return Annotated[plain | None, option]


def meaning(field: attrs.Attribute[Any], mark: str = "") -> str:
    """The help text of a field, and its choices, each between two `mark`, unless the text names all of them."""
    text, choices = field.metadata["help"], field.metadata["choices"] or ()
    if all(re.search(rf"\b{choice}\b", text) for choice in choices):
        return str(text)
    return f"{text} One of {', '.join(f'{mark}{choice}{mark}' for choice in choices)}."


def default_text(field: attrs.Attribute[Any]) -> str:
    """The default of a field as help texts and documentation show it; empty if there is nothing to show."""
    default = field.default
    if default is attrs.NOTHING:
        return "required"
    if default is None or isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return ""
    return f"default {default:g}" if isinstance(default, float) else f"default {str(default).lower()}"


def markdown_table(config: type) -> str:
    """The fields of `config` as a Markdown table for the documentation."""
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for name, field in settings.fields_of(config).items():
        lines.append(f"| `{name}` | {default_text(field).removeprefix('default ')} | {meaning(field, '`')} |")
    return "\n".join(lines) + "\n"
