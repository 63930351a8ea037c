"""Typed configurations of models and training runs.

A configuration is a frozen attrs class. Define each of its fields with `setting`. Values are Python objects, or come
from YAML or the command line. A configuration never imports or evaluates its values.
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

__all__ = [
    "build",
    "fields_of",
    "from_text",
    "other_default",
    "renamed",
    "setting",
    "takes_former_names",
    "to_dict",
    "with_present_names",
]

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
    """Define a field of a configuration class.

    Args:
        default: value if none is given; without a default the field is required.
        help: one sentence for `--help` and the documentation.
        choices: the allowed strings.
        minimum, above, maximum, below: bounds of a number; `above` and `below` exclude the bound itself.
        factory: creates the default if it is a container.
        group: the heading under which `--help` and the documentation list the field.
        metavar: what `--help` shows as the value; by default a word for the type.
        free_on_resume: a resumed training run may change this field.
        former: deprecated name of the field; see `with_present_names` and `takes_former_names`.
        former_choices: deprecated names of choices; they still work, with a `FutureWarning`.
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
    """Return the message for a deprecated name."""
    return f"{old} is now {new}; the old name will be removed in the next release"


def with_present_names(
    cls: type, values: Mapping[str, Any], prefix: str = "", *, quiet: bool = False
) -> dict[str, Any]:
    """Replace former names of fields of `cls`, and of their choices, in `values`.

    Args:
        cls: the configuration class.
        values: names and values.
        prefix: prefix of the names in messages, such as `--` for options (`--batch-size`).
        quiet: issue no `FutureWarning` for former names (for files that the package wrote).

    Raises:
        ValueError: `values` contains both names of a field with different values.
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
            if name in result and result[name] != result[former]:
                raise ValueError(f"{shown_as(former)}: the former name of {shown_as(name)}; give the new name alone")
            replaced(shown_as(former), shown_as(name))
            result[name] = result.pop(former)
        value = result.get(name)
        if isinstance(value, str) and value in field.metadata["former_choices"]:
            new = field.metadata["former_choices"][value]
            replaced(f"{shown_as(name)} {value}", f"{shown_as(name)} {new}")
            result[name] = new
    return result


def takes_former_names(cls: type[Config]) -> type[Config]:
    """Let the constructor of a configuration class take former names of its fields, with a `FutureWarning`."""
    former = {field.metadata["former"]: name for name, field in fields_of(cls).items() if field.metadata["former"]}
    create = cls.__init__

    @functools.wraps(create)
    def init(self: Config, **values: Any) -> None:
        for old, new in former.items():
            if old in values:
                if new in values:
                    raise ValueError(f"{old}: the former name of {new}; give the new name alone")
                warnings.warn(renamed(old, new), FutureWarning, stacklevel=2)
                values[new] = values.pop(old)
        create(self, **values)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def _present_choice(former: Mapping[str, str], value: Any) -> Any:
    if not isinstance(value, str) or value not in former:
        return value
    warnings.warn(renamed(value, former[value]), FutureWarning, stacklevel=3)
    return former[value]


def other_default(cls: type, name: str, default: Any) -> Any:
    """Return the field `name` of the configuration class `cls` with another default, for a derived class."""
    field = fields_of(cls)[name]
    return attrs.field(default=default, validator=field.validator, metadata=field.metadata, converter=field.converter)


def fields_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of a configuration class by name, in order of definition."""
    return {field.name: field for field in attrs.fields(cls)}


@functools.cache
def type_of(cls: type, name: str) -> tuple[type, bool]:
    """Return the type of a field without None, and whether it may be None."""
    hint = _hints(cls)[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return typing.get_origin(inner) or inner, True
    return typing.get_origin(hint) or hint, False


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    # One call evaluates the hints of all fields: once per field, it would take half a second of `itm-fast train`.
    return typing.get_type_hints(cls)


def build(cls: type[Config], values: Mapping[str, Any], what: str = "setting") -> Config:
    """Build a configuration from names and values.

    Raises:
        ValueError: a name is unknown (the message suggests the nearest), a required one is missing, or a value is bad.
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
    """Return the error message for an unknown name: it suggests the nearest known name, or lists all."""
    near = _nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown {what} {shown(name)}: {hint}"


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name that is most like `name`, in upper or lower case; "" if none is near."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return folded[near[0]] if near else ""


def to_dict(config: Any) -> dict[str, Any]:
    """Return names and values of a configuration, ready for JSON or YAML."""
    return attrs.asdict(config)


def from_text(text: str) -> Any:
    """Parse a command-line value as YAML: a number, true, false, null or a string."""
    try:
        value = parse_yaml(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str | None) else text


def _number_from_text(cls: type, name: str, value: Any) -> Any:
    """Convert a string such as `2e-4`, which YAML does not parse as a number, to a number if the field is numeric."""
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
        near = _nearest(str(value), choices)
        hint = f" (did you mean {near!r}?)" if near else ""
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
