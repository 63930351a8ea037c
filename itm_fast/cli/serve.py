"""`itm-fast serve`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from itm_fast.cli.index_options import Checkpoints, Device, IndexArgument, Threads

__all__ = ["check_packages", "run_service", "serve"]

Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines in, without a login.")
]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 chooses a free one.")]


def check_packages() -> None:
    """Raise ValueError if a package of the extra `serve` is missing."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"serve: the package {name} is not installed; install it with pip install 'itm_fast[serve]'"
            )


def serve(
    index: IndexArgument,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name by which clients may call the service, besides IP addresses; repeatable."
        ),
    ] = None,
    max_k: Annotated[int, typer.Option(metavar="N", min=1, help="Most results per query.")] = 200,
    max_candidates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most items that the model scores per query, or as many as results.")
    ] = 5000,
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests at a time; more are refused with status 429.")
    ] = 64,
    max_seconds: Annotated[float, typer.Option(metavar="X", help="Time of a request, its upload included.")] = 10.0,
    max_megabytes: Annotated[int, typer.Option(metavar="N", min=1, help="Size of an uploaded picture.")] = 10,
    max_megapixels: Annotated[int, typer.Option(metavar="N", min=1, help="Pixels of an uploaded picture.")] = 30,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Queries that are computed together.")] = 16,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request, with its query.")] = False,
    checkpoint: Checkpoints = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Serve an index over HTTP: a page to search by typing, and JSON for programs.

    A changed or replaced index is opened while the service runs. Ctrl-C stops it after the requests in progress.
    """
    check_packages()
    from itm_fast.files.processors import device_of, set_threads
    from itm_fast.serve import Limits

    if not 0 < max_seconds < float("inf"):
        raise ValueError(f"--max-seconds: expected a finite number above 0, got {max_seconds:g}")
    limits = Limits(
        k=max_k,
        candidates=max_candidates,
        concurrency=max_requests,
        batch=batch,
        seconds=max_seconds,
        body=max_megabytes * 2**20,
        pixels=max_megapixels * 10**6,
    )
    set_threads(threads)
    run_service(
        index,
        checkpoint,
        browser=browser,
        host=host,
        port=port,
        device=device_of(device),
        limits=limits,
        hosts=allow_host or (),
        access_log=access_log,
    )


def run_service(index: Path, checkpoints: list[Path] | None, *, browser: bool, **options: Any) -> None:
    """Serve an index as `itm_fast.serve.serve`, and print the address."""
    from itm_fast.serve import serve as run

    def ready(url: str) -> None:
        typer.echo(f"serving {index} at {url} (Ctrl-C stops)")
        if browser:
            import threading
            import webbrowser

            # Some browsers end the call only when they are closed.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    run(index, checkpoints, ready=ready, **options)
    typer.echo("stopped")
