"""Assemble the commands, and report all user errors in one way.

Every user error becomes one line `itm-fast: error: …` on stderr. The exit status is 2 for errors of the command line
itself and 1 otherwise. Modules with long import times are imported inside the commands, so that `--help` is fast. The
module of `train` needs torch for its options: it is imported when `train` is called.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from itm_fast.cli import data, data_import, index
from itm_fast.cli.bench import bench
from itm_fast.cli.convert import convert
from itm_fast.cli.curves import curves
from itm_fast.cli.demo import demo
from itm_fast.cli.evaluate import evaluate
from itm_fast.cli.explain import explain
from itm_fast.cli.features import features
from itm_fast.cli.model_list import models
from itm_fast.cli.options import Command, Group
from itm_fast.cli.realign import realign
from itm_fast.cli.recipes import recipes
from itm_fast.cli.score import score
from itm_fast.cli.search import search
from itm_fast.cli.serve import serve
from itm_fast.cli.speech import speech
from itm_fast.files.messages import printable, shortened, shown
from itm_fast.version import __version__

__all__ = ["app", "main", "run"]


_MANY_FILES = 1 << 16


class _Root(Group):
    """The group of all commands. It makes `train` when that is called: `_train` only stands for it in the help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name == "train":
            from itm_fast.cli.train import train_command

            command = train_command()
        return name, command, rest


def _train() -> None:
    """Train a model on region features or pictures and write the best one to --out."""


app = typer.Typer(
    name="itm-fast",
    cls=_Root,
    no_args_is_help=True,
    help="Train, evaluate and benchmark image-text matching models.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: Any = (
    demo, _train, recipes, models, evaluate, score, search, serve, explain, speech, features, curves,
    realign, convert, bench,
)  # fmt: skip
for command in _COMMANDS:
    app.command("train" if command is _train else None, cls=Command)(command)
data.app.command("import", cls=Command)(data_import.import_command)
app.add_typer(data.app, name="data")
app.add_typer(index.app, name="index")

# Not every version of typer exports the base class of usage errors, from which the public one derives.
_UsageError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"itm-fast {__version__}")
        raise typer.Exit


# Commands that distribute their work over processes. In other commands, each process would do all work.
_SHARED = ("train", "evaluate")


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, evaluate and benchmark image-text matching models."""
    if "WORLD_SIZE" not in os.environ:
        return
    from itm_fast.distributed import launched

    size, command = launched().size, context.invoked_subcommand
    if size > 1 and command is not None and command not in _SHARED:
        raise ValueError(f"{command}: runs in one process, got {size}; several can {' or '.join(_SHARED)}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit. This is the entry point of `itm-fast` and of `python -m itm_fast`."""
    # A stream that was closed before the start, as by some daemons, is None. Progress bars need a file.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    # Paths that are not UTF-8 contain lone surrogates, which stdout refuses by default.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    _allow_many_files()
    sys.exit(run(arguments))


def _allow_many_files() -> None:
    """Raise the limit of open files: an index has one for each 128 MiB, twice while it changes."""
    try:
        import resource
    except ImportError:  # Not on Windows.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems allow fewer than they say.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        status = app(args=arguments, prog_name="itm-fast", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            _print_error(_with_value(error))
        return int(error.exit_code)
    except OSError as error:
        names_file = isinstance(error.filename, str) and error.strerror is not None
        _print_error(f"{error.filename}: {error.strerror}" if names_file else str(error))
        return 1
    except ValueError as error:
        _print_error(str(error))
        return 1
    except (RuntimeError, MemoryError) as error:
        if str(error).startswith("DataLoader worker"):
            # torch raises this error anywhere in the training process. Other reading errors arrive unchanged.
            said = next(iter(str(error).splitlines())).strip(" .")
            kept = "continue a training with --resume, and an import with the same command"
            _print_error(f"a process of --workers has ended ({said}); {kept}")
            return 1
        if not _is_out_of_memory(error):
            raise
        _print_error(
            "not enough memory; a smaller model, --batch-size or --micro-batch needs less, and --features disk leaves "
            "more"
        )
        return 1
    except (KeyboardInterrupt, typer.Abort):
        _print_error("interrupted")
        return 130


def _with_value(error: Any) -> str:
    """Return the message of a usage error with the wrong value, which some versions of typer leave out."""
    message: str = error.format_message()
    details = getattr(error.__cause__, "errors", None)
    value = details()[0].get("input") if callable(details) else None
    return message if value is None or str(value) in message else f"{message}, got {shown(value)}"


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises an exception class of its own only for accelerators.
    own = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return own or "can't allocate memory" in str(error) or "Storage size calculation overflowed" in str(error)


def _print_error(message: str) -> None:
    # Until the processes have met, all processes on a machine fail in the same way; the first reports it.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        from itm_fast.distributed.world import joined_before

        if not joined_before():
            return
    typer.echo(f"itm-fast: error: {_one_line(message)}", err=True)


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    typer.echo(f"itm-fast: warning: {_one_line(str(message))}", err=True)


def _one_line(message: str) -> str:
    # Our messages shorten quotations of files. This shortens those of libraries.
    return printable(shortened(" ".join(message.split()), 10_000))
