"""Write docs/reference/cli.md and docs/reference/recipes.md from the options, settings and recipes of the package.

    python tools/write_option_tables.py            # writes both pages
    python tools/write_option_tables.py --check    # exit status 1 if a page is out of date

Hidden options, the former names of others, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import typer

from itm_fast.cli.app import app
from itm_fast.cli.options import markdown_table
from itm_fast.models import config_class, names
from itm_fast.training import recipes

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every command of a group with its full name, including commands of nested groups."""
    context = typer.Context(group)
    for listed in group.list_commands(context):
        name, command, _ = group.resolve_command(context, [listed])
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def cell(text: str) -> str:
    """Return text for a table cell: one line, with Markdown characters escaped."""
    return escape(" ".join(text.split()), quote=False).replace("|", "&#124;")


def command_section(name: str, command: Any) -> str:
    """Return usage, help and one table for each panel of options."""
    context = typer.Context(command, info_name=name)
    panels: dict[str, list[str]] = {}
    arguments = []
    for parameter in command.params:
        if parameter.hidden:
            continue
        option, text = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            arguments.append(option.split()[0])
        panel = getattr(parameter, "rich_help_panel", None) or "General"
        panels.setdefault(panel, []).append(f"| <code>{cell(option)}</code> | {cell(text)} |")
    lines = [f"## {name}", "", "```", " ".join([name, *arguments, "[OPTIONS]"]), "```", "", command.help, ""]
    for panel, rows in panels.items():
        if len(panels) > 1:
            lines += [f"**{panel}**", ""]
        lines += ["| option | meaning |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def cli_page() -> str:
    sections = [command_section(*found) for found in commands(typer.main.get_command(app), "itm-fast")]
    models = [f"### {name}\n\n{markdown_table(config_class(name))}" for name in sorted(names())]
    return "\n".join(
        [
            "# Command line",
            "",
            "All commands with all of their options. `tools/write_option_tables.py` generates the page.",
            "",
            *sections,
            "## Model options",
            "",
            "`itm-fast train --model NAME --model-option SETTING=VALUE` or `models.create(NAME, SETTING=VALUE)` "
            "sets them.",
            "",
            *models,
        ]
    )


def recipes_page() -> str:
    lines = [
        "# Recipes",
        "",
        "A recipe holds the settings that a paper and its official code state for one data set; other settings keep "
        "their defaults. Options on the command line override `--config FILE`, which overrides the recipe. "
        "`tools/write_option_tables.py` generates the page.",
        "",
        "```",
        "itm-fast train --recipe scan-t2i-f30k --data data/f30k_precomp --out runs/scan",
        "itm-fast recipes scan-t2i-f30k > my-scan.yaml   # a file to edit and pass to --config",
        "```",
        "",
        recipes.markdown_table(),
    ]
    return "\n".join(lines)


PAGES = {FOLDER / "cli.md": cli_page, FOLDER / "recipes.md": recipes_page}


def main() -> int:
    for path, render in PAGES.items():
        if "--check" not in sys.argv:
            path.write_text(render(), encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != render():
            print(f"{path}: is out of date; run python tools/{Path(__file__).name}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
