"""Search the pictures of the demo: their index, the commands that the demo prints, and `itm-fast demo --serve`.

Inside: `build_index`, `check_place`, `commands`, `is_finished`, `serve_demo`.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import typer

from itm_fast.cli.serve import run_service

__all__ = ["build_index", "check_place", "commands", "is_finished", "serve_demo"]


def _index_of(out: Path) -> Path:
    named = out.resolve() if out.name in ("", "..") else out
    return named.with_name(f"{named.name}-index")


def _program() -> str:
    """Return how a shell here calls the command: by its path if it is in an environment that is not activated."""
    own, active = Path(sys.prefix, "bin", "itm-fast"), os.environ.get("VIRTUAL_ENV")
    activated = active is not None and Path(active).resolve() == Path(sys.prefix).resolve()
    if sys.prefix == sys.base_prefix or activated or not own.exists():
        return "itm-fast"
    return shlex.quote(os.path.relpath(own))


def commands(out: Path) -> str:
    """Return the commands that search the pictures of a finished demo, as text for the terminal."""
    program = _program()
    run, index = (shlex.quote(str(path)) for path in (out, _index_of(out)))
    return (
        f"search the pictures in a browser:\n  {program} demo --serve --out {run}\n"
        f'or in the terminal:\n  {program} search {index} "a red heart" --html found.html'
    )


def check_place(out: Path) -> None:
    """Raise ValueError if the folder of the index contains anything else than the index of an earlier demo."""
    from itm_fast.search import is_index
    from itm_fast.search.manifest import read_manifest
    from itm_fast.search.writing import check_folder

    index = _index_of(out)
    check_folder(index)
    if is_index(index) and read_manifest(index).checkpoints != (str(out.resolve()),):
        raise ValueError(f"{index}: contains an index of another model, and the demo writes one; choose another --out")


def is_finished(out: Path) -> bool:
    """Return whether a folder holds a demo that was trained to its end: the report is written last."""
    from itm_fast.training import run_folder

    if not all((out / name).is_file() for name in ("report.html", "model.safetensors", run_folder.CONFIG)):
        return False
    data = run_folder.saved_config(out).data
    return data is not None and Path(data).resolve() == (out / "data").resolve()


def serve_demo(out: Path, port: int) -> None:
    """Serve the index of a finished demo until it is stopped. Build it if it is missing or of another model."""
    index = _index_of(out)
    if not _fits(index, out):
        check_place(out)
        build_index(out)
    run_service(index, [out], browser=True, port=port)


def _fits(index: Path, out: Path) -> bool:
    from itm_fast.search import Index

    try:
        Index.open(index, [str(out)])
    except ValueError:
        return False
    return True


def build_index(out: Path) -> None:
    """Build an index of the test pictures of a finished demo, in place of an earlier one."""
    from itm_fast.data import Vocabulary, open_split
    from itm_fast.search import Index
    from itm_fast.training import run_folder

    typer.echo(f"building the index {_index_of(out)}")
    vocabulary = Vocabulary.from_file(out / run_folder.VOCABULARY)
    test, train = (open_split(out / "data", split, vocabulary) for split in ("test", "train"))
    Index.build([str(out)], test, _index_of(out), training=train, overwrite=True, progress=True)
