"""Typed settings: what a model's or a training run's configuration is made of.

Inside: `setting` (a field with its help text and bounds), `other_default` (a field of another class with a default of
its own), `build` (from names and values, unknown names refused), `with_present_names` (former names replaced),
`renamed` (the note for one), `to_dict`, `from_text` (a value from the command line), `fields_of`, `unknown_name`.

A configuration is a frozen attrs class whose fields are all made by `setting`. Values come as Python objects, from YAML
or from the command line; nothing in a configuration is ever imported or evaluated.
"""

from __future__ import annotations

import difflib
import functools
import math
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from itm_fast.files.documents import parse_yaml
from itm_fast.files.messages import shown

__all__ = ["build", "fields_of", "from_text", "other_default", "renamed", "setting", "to_dict", "with_present_names"]

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
    metavar: str | None = None,
    free_on_resume: bool = False,
    former: str | None = None,
    former_choices: Mapping[str, str] | None = None,
) -> Any:
    """A field of a configuration class.

    Args:
        default: the value where none is given; without one the field is required.
        help: one sentence for `--help` and the documentation.
        choices: the allowed strings.
        minimum, above, maximum, below: bounds of a number; `above` and `below` exclude the bound itself.
        factory: makes the default where it is a container.
        group: the heading under which `--help` and the documentation list the field.
        metavar: what `--help` shows as the value; by default a word for the type.
        free_on_resume: a resumed training run may change this field.
        former: the name of the field in the release before; `with_present_names` reads it.
        former_choices: allowed strings by their names in the release before; they still work, with a `FutureWarning`.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "bounds": {"minimum": minimum, "above": above, "maximum": maximum, "below": below},
        "group": group,
        "metavar": metavar,
        "free_on_resume": free_on_resume,
        "former": former,
        "former_choices": former_choices or {},
    }
    if factory is not None:
        return attrs.field(factory=factory, validator=_validate, metadata=metadata)
    converter = functools.partial(_present_choice, former_choices) if former_choices else None
    return attrs.field(default=default, validator=_validate, metadata=metadata, converter=converter)


def renamed(old: str, new: str) -> str:
    """The note for a name that still works in this release."""
    return f"{old} is now {new}; the old name goes away in the next release"


def with_present_names(
    cls: type, values: Mapping[str, Any], prefix: str = "", *, quiet: bool = False
) -> dict[str, Any]:
    """Replace former names of fields of `cls`, and of their choices, in `values`.

    Args:
        cls: the configuration class.
        values: names and values.
        prefix: stands before the names in messages; with one, they are options such as `--batch-size`.
        quiet: give no `FutureWarning` for a former name, as for files that the package itself has written.

    Raises:
        ValueError: `values` has a field under both of its names.
    """

    def replaced(old: str, new: str) -> str:
        if not quiet:
            warnings.warn(renamed(old, new), FutureWarning, stacklevel=3)
        return new

    def shown_as(name: str) -> str:
        return prefix + name.replace("_", "-") if prefix else name

    result = dict(values)
    for name, field in fields_of(cls).items():
        former = field.metadata["former"]
        if former in result:
            if name in result:
                raise ValueError(f"{shown_as(former)}: the former name of {shown_as(name)}; give the new name alone")
            replaced(shown_as(former), shown_as(name))
            result[name] = result.pop(former)
        value = result.get(name)
        if isinstance(value, str) and value in field.metadata["former_choices"]:
            new = field.metadata["former_choices"][value]
            replaced(f"{shown_as(name)} {value}", f"{shown_as(name)} {new}")
            result[name] = new
    return result


def _present_choice(former: Mapping[str, str], value: Any) -> Any:
    if not isinstance(value, str) or value not in former:
        return value
    warnings.warn(renamed(value, former[value]), FutureWarning, stacklevel=3)
    return former[value]


def other_default(cls: type, name: str, default: Any) -> Any:
    """The field `name` of the configuration class `cls` with another default, for a class that derives from it."""
    field = fields_of(cls)[name]
    return attrs.field(default=default, validator=field.validator, metadata=field.metadata, converter=field.converter)


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
