"""Recipes: the published settings of a model on a data set, by name.

Each recipe is a file `itm_fast/recipes/NAME.yaml` with a description, a source and the settings that the source states.
Other settings keep their defaults. Inside: `Recipe`, `names`, `load`, `merge`, `markdown_table`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs
import yaml

from itm_fast.files.messages import shown

__all__ = ["Recipe", "load", "markdown_table", "merge", "names"]

_FOLDER = files("itm_fast").joinpath("recipes")


@attrs.frozen
class Recipe:
    """A recipe: `settings` are names and values of a `TrainConfig`, `source` names the paper and code.

    `notes` says what else a training needs, or what differs from the source; it may be empty.
    """

    name: str
    description: str
    source: str
    settings: dict[str, Any]
    notes: str = ""

    def to_yaml(self) -> str:
        """Return the settings as a configuration file, with description, source and notes as comments at the top."""
        comments = [self.description, self.source, *self.notes.splitlines()]
        return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(self.settings, sort_keys=False)


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def load(name: str) -> Recipe:
    """Read the recipe called `name`; ValueError with near names if it is unknown."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "itm-fast recipes lists them"
        raise ValueError(f"no recipe {shown(name)}; {hint}")
    text = _FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    notes = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return Recipe(name, **yaml.safe_load(text), notes="\n".join(line.removeprefix("# ") for line in notes))


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings; later layers win. The options of a model and of a loss are merged by name."""
    merged: dict[str, Any] = {}
    for layer in layers:
        before = {name: merged[name] for name in ("model_options", "loss_options") if name in merged}
        merged.update(layer)
        for name, options in before.items():
            new = layer.get(name, {})
            if not isinstance(options, Mapping):
                merged[name] = options  # An invalid value stays, so that `build` refuses it.
            elif options and isinstance(new, Mapping):
                merged[name] = {**options, **new}
    return merged


def markdown_table() -> str:
    """Return all recipes as a Markdown table for the documentation."""
    lines = ["| recipe | what it trains | notes |", "| --- | --- | --- |"]
    for recipe in map(load, names()):
        notes = " ".join(recipe.notes.splitlines()).replace("|", "\\|")
        lines.append(f"| `{recipe.name}` | {recipe.description} | {notes} |")
    return "\n".join(lines) + "\n"
