"""Command-line options made from the fields of a configuration class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import attrs
import typer

from itm_fast import config as settings

__all__ = ["given_options", "with_config_options"]


def with_config_options(
    config: type, replaced: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: gives a command one option per field of `config`, None where it is not on the command line.

    The command takes them as keyword arguments `**values`, beside its own named parameters. Fields in `replaced` get no
    option of their own.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        generated = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(config, field))
            for name, field in settings.fields_of(config).items()
            if name not in replaced
        ]
        parameters = [*generated, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """Those options that stood on the command line."""
    return {name: value for name, value in values.items() if value is not None}


def _annotation(config: type, field: attrs.Attribute[Any]) -> Any:
    plain, _ = settings.type_of(config, field.name)
    flag = "--" + field.name.replace("_", "-")
    choices = field.metadata["choices"]
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if plain is bool else flag,
        help=f"{field.metadata['help']} ({default_text(field)})".replace(" ()", ""),
        show_default=False,
        metavar="|".join(choices) if choices else None,
        rich_help_panel=field.metadata["group"],
    )
    return Annotated[plain | None, option]


def default_text(field: attrs.Attribute[Any]) -> str:
    """The default of a field as help texts and documentation show it; empty where there is nothing to show."""
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
        choices = field.metadata["choices"]
        meaning = field.metadata["help"] + (
            f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        )
        lines.append(f"| `{name}` | {default_text(field).removeprefix('default ')} | {meaning} |")
    return "\n".join(lines) + "\n"
