"""Search the pictures of the demo: the commands that it prints, and `itm-fast demo --serve`.

Inside: `commands`, `is_finished`, `serve_demo`.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import typer

from itm_fast.cli.serve import run_service

__all__ = ["commands", "is_finished", "serve_demo"]


def _index_of(out: Path) -> Path:
    return out.with_name(f"{out.name}-index")


def _program() -> str:
    """Return how a shell here calls the command: by its path if it is in an environment that is not activated."""
    own, active = Path(sys.prefix, "bin", "itm-fast"), os.environ.get("VIRTUAL_ENV")
    activated = active is not None and Path(active).resolve() == Path(sys.prefix).resolve()
    if sys.prefix == sys.base_prefix or activated or not own.exists():
        return "itm-fast"
    return shlex.quote(os.path.relpath(own))


def commands(out: Path, data: Path) -> str:
    """Return the commands that search the pictures of a finished demo, as text for the terminal."""
    program = _program()
    run, index, folder = (shlex.quote(str(path)) for path in (out, _index_of(out), data))
    return (
        f"search the pictures in a browser:\n  {program} demo --serve --out {run}\n"
        "or in the terminal:\n"
        f"  {program} index build --checkpoint {run} --data {folder} --out {index}\n"
        f'  {program} search {index} "a red heart" --html found.html'
    )


def is_finished(out: Path) -> bool:
    """Return whether a folder holds a demo that was trained to its end: the report is written last."""
    from itm_fast.training import run_folder

    if not all((out / name).is_file() for name in ("report.html", "model.safetensors", run_folder.CONFIG)):
        return False
    data = run_folder.saved_config(out).data
    return data is not None and Path(data).resolve() == (out / "data").resolve()


def serve_demo(out: Path, port: int) -> None:
    """Build an index of the test pictures unless there is one of this model, and serve it until it is stopped."""
    index = _index_of(out)
    if not _fits(index, out):
        typer.echo(f"building the index {index}")
        _build(index, out)
    run_service(index, [out], browser=True, port=port)


def _fits(index: Path, out: Path) -> bool:
    from itm_fast.search import Index

    try:
        Index.open(index, [str(out)])
    except ValueError:
        return False
    return True


def _build(index: Path, out: Path) -> None:
    from itm_fast.data import Vocabulary, open_split
    from itm_fast.search import Index
    from itm_fast.training import run_folder

    vocabulary = Vocabulary.from_file(out / run_folder.VOCABULARY)
    test, train = (open_split(out / "data", split, vocabulary) for split in ("test", "train"))
    Index.build([str(out)], test, index, training=train, overwrite=True, progress=True)
