"""Typed settings: what a model's or a training run's configuration is made of.

Inside: `setting` (a field with its help text and bounds), `other_default` (a field of another class with a default of
its own), `build` (from names and values, unknown names refused), `to_dict`, `from_text` (one value from the command
line), `fields_of`, `unknown_name`.

A configuration is a frozen attrs class whose fields are all made by `setting`. Values come as Python objects, from YAML
or from the command line; nothing in a configuration is ever imported or evaluated.
"""

from __future__ import annotations

import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from itm_fast.files.documents import parse_yaml
from itm_fast.files.messages import shown

__all__ = ["build", "fields_of", "from_text", "other_default", "setting", "to_dict"]

Config = TypeVar("Config")
_BOUNDS = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}


def setting(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    factory: Any = None,
    group: str = "Options",
    free_on_resume: bool = False,
) -> Any:
    """A field of a configuration class.

    Args:
        default: the value where none is given; without one the field is required.
        help: one sentence for `--help` and the documentation.
        choices: the allowed strings.
        minimum, above, maximum, below: bounds of a number; `above` and `below` exclude the bound itself.
        factory: makes the default where it is a container.
        group: the heading under which `--help` and the documentation list the field.
        free_on_resume: a resumed training run may change this field.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "bounds": {"minimum": minimum, "above": above, "maximum": maximum, "below": below},
        "group": group,
        "free_on_resume": free_on_resume,
    }
    if factory is not None:
        return attrs.field(factory=factory, validator=_validate, metadata=metadata)
    return attrs.field(default=default, validator=_validate, metadata=metadata)


def other_default(cls: type, name: str, default: Any) -> Any:
    """The field `name` of the configuration class `cls` with another default, for a class that derives from it."""
    field = fields_of(cls)[name]
    return attrs.field(default=default, validator=field.validator, metadata=field.metadata)


def fields_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields of a configuration class by name, in their order."""
    return {field.name: field for field in attrs.fields(cls)}


@functools.cache
def type_of(cls: type, name: str) -> tuple[type, bool]:
    """The plain type of a field, and whether it may be None."""
    hint = typing.get_type_hints(cls)[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return typing.get_origin(inner) or inner, True
    return typing.get_origin(hint) or hint, False


def build(cls: type[Config], values: Mapping[str, Any], what: str = "setting") -> Config:
    """Makes a configuration from names and values.

    Raises:
        ValueError: a name is unknown (the nearest known one is named), a required one is missing, or a value is bad.
    """
    known = fields_of(cls)
    for name in values:
        if name not in known:
            raise ValueError(unknown_name(what, str(name), list(known)))
    for name, field in known.items():
        if field.default is attrs.NOTHING and name not in values:
            raise ValueError(f"{name}: this {what} is required")
    return cls(**{name: _number_from_text(cls, name, value) for name, value in values.items()})


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The error text for a name that nobody knows, with the nearest known one, or all where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown {what} {shown(name)}: {hint}"


def to_dict(config: Any) -> dict[str, Any]:
    """Names and values of a configuration, ready for JSON or YAML."""
    return attrs.asdict(config)


def from_text(text: str) -> Any:
    """A value written on the command line: a number, true, false, null or a string, as YAML reads it."""
    try:
        value = parse_yaml(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str | None) else text


def _number_from_text(cls: type, name: str, value: Any) -> Any:
    """YAML reads `2e-4` (no dot) as a string; where a number is wanted it becomes one."""
    plain, _ = type_of(cls, name)
    if plain in (int, float) and isinstance(value, str):
        try:
            return plain(value)
        except ValueError:
            return value
    return value


def _validate(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    cls: type = type(instance)
    plain, optional = type_of(cls, field.name)
    if value is None and optional:
        return
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            object.__setattr__(instance, field.name, float(value))
        except OverflowError:
            raise ValueError(f"{field.name}: expected a finite number, got {shown(value)}") from None
    elif not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(plain)
        wanted = wanted or "names and values"
        raise ValueError(f"{field.name}: expected {wanted}, got {shown(value)}")
    for key in value if isinstance(value, Mapping) else ():
        if not isinstance(key, str):
            raise ValueError(f"{field.name}: expected names as strings, got {shown(key)}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{field.name}: expected one of {', '.join(choices)}, got {shown(value)}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        _validate_bounds(field, value)


def _validate_bounds(field: attrs.Attribute[Any], value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name}: expected a finite number, got {shown(value)}")
    bounds = {kind: bound for kind, bound in field.metadata["bounds"].items() if bound is not None}
    fits = {
        "minimum": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "maximum": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    if not all(fits[kind](bound) for kind, bound in bounds.items()):
        wanted = " and ".join(f"{_BOUNDS[kind]} {bound}" for kind, bound in bounds.items())
        raise ValueError(f"{field.name}: expected a number {wanted}, got {shown(value)}")
