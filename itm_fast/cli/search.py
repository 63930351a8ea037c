"""`itm-fast search`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from itm_fast.cli.index_options import Checkpoints, Device, Threads
from itm_fast.cli.targets import check_targets

if TYPE_CHECKING:
    from itm_fast.report import FoundItem
    from itm_fast.search import Hit, Index, Results

# Queries that are encoded at a time.
_BATCH = 64
# More would make the page too large for a browser.
_MOST_ON_PAGE = 200


class _Side(str, Enum):
    images = "images"
    captions = "captions"


def search(
    index: Annotated[
        str,
        typer.Argument(
            metavar="INDEX",
            help="Folder of the index; or services that hold parts of a collection, as http://HOST:PORT,http://HOST:PORT.",
            show_default=False,
        ),
    ],
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="What to search for.", show_default=False)
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", metavar="N", help="Results per query; default: 10, or all of a smaller index.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Search with this picture; repeatable.")
    ] = None,
    like: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Search with this image of the index; repeatable.")
    ] = None,
    queries: Annotated[Path | None, typer.Option(metavar="FILE", help="Search with each line of a text file.")] = None,
    of: Annotated[
        _Side | None,
        typer.Option(
            metavar="NAME",
            help="Search images or captions. Default: images for texts; captions for pictures, if the index has any.",
        ),
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(metavar="N", help="Number of items that the model scores; default: that of the index.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Score all items.")] = False,
    encoder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Vision model that encodes --image, if it was moved since the build.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per query and line.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page of the results with their pictures.")
    ] = None,
    checkpoint: Checkpoints = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Find the best items of an index for texts or pictures.

    A picture finds captions, or with --of images those that look like it.
    """
    from itm_fast.files.messages import shown
    from itm_fast.files.processors import device_of, set_threads
    from itm_fast.report import SearchPage, write_search
    from itm_fast.search import Index
    from itm_fast.search.query_file import read_lines
    from itm_fast.search.remote import Shards, addresses_in

    addresses = addresses_in(index)
    check_targets(
        {"--html": html},
        {"--queries": queries, "--image": image},
        [
            ("INDEX", None if addresses else Path(index)), ("--encoder", encoder),
            *(("--checkpoint", run) for run in checkpoint or ()),
        ],
    )  # fmt: skip
    lines = read_lines(queries) if queries is not None else {}
    texts = [*(text or ()), *lines.values()]
    given = {"texts": texts, "pictures": [str(path) for path in image or ()], "items": list(like or ())}
    kinds = [name for name, values in given.items() if values]
    if encoder is not None and kinds != ["pictures"]:
        raise ValueError("--encoder: expected only with --image")
    if len(kinds) != 1:
        raise ValueError("TEXT: expected texts, --image or --like, and one of these at a time")
    if html is not None and len(given[kinds[0]]) > _MOST_ON_PAGE:
        raise ValueError(f"--html: expected at most {_MOST_ON_PAGE} queries, got {len(given[kinds[0]]):,}")
    set_threads(threads)
    values = given[kinds[0]]
    if addresses and (like or html or encoder or checkpoint):
        raise ValueError("--like, --html, --encoder, --checkpoint: expected only with an index on this machine")
    shards = Shards(addresses) if addresses else None
    opened = None if addresses else Index.open(index, checkpoint, device=device_of(device))
    if opened is not None:
        _check_lines(opened, queries, lines)
    found: list[Results] = []

    def answers() -> Iterator[Results]:
        side = None if of is None else of.value
        if shards is not None:
            for one in values:
                asked = {"picture": Path(one)} if image else {"text": one}
                yield shards.search(**asked, k=k, of=side, candidates=candidates, exact=exact)
        if opened is None:
            return
        for first in range(0, len(values), _BATCH):
            yield from opened.search(
                **{kinds[0]: values[first : first + _BATCH]},  # type: ignore[arg-type]
                k=k,
                of=side,
                candidates=candidates,
                exact=exact,
                encoder=encoder,
            )

    for results in answers():
        if results.unknown and not as_json:
            words = ", ".join(results.unknown)
            warnings.warn(f"query {shown(results.query)}: the model does not know {words}", stacklevel=2)
        if as_json:
            typer.echo(json.dumps(attrs.asdict(results, filter=_is_told)))
        elif html is None or len(values) == 1:
            _print(results)
        if html is not None:
            found.append(results)
    if html is not None and opened is not None:
        write_search(
            html,
            SearchPage(
                queries=[(one.query, [_found(opened, hit) for hit in one.hits]) for one in found],
                facts=[(name, str(value)) for name, value in _facts(opened, found).items()],
            ),
        )
        typer.echo(f"page: {html}", err=as_json)


def _check_lines(index: Index, file: Path | None, lines: dict[int, str]) -> None:
    """Raise ValueError with the number of a line that is no query, before the first search."""
    from itm_fast.search.queries import check_text

    for number, line in lines.items():
        try:
            check_text(index.members, line)
        except ValueError as error:
            raise ValueError(f"{file}: line {number}: {error}") from None


def _is_told(field: attrs.Attribute[object], value: object) -> bool:
    """Return whether JSON has a field: that of the service only if several were asked."""
    return field.name != "service" or bool(value)


def _print(results: Results) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from itm_fast.files.messages import printable, shortened

    # Folded, because ids that are cut off look the same and cannot be used for --like.
    services = any(hit.service for hit in results.hits)
    # An image without captions shows the path of its picture.
    kinds = {
        "caption" if hit.item.captions else "picture" for hit in results.hits if hit.item.captions or hit.item.picture
    }
    head = " or ".join(sorted(kinds)) or "caption"
    long = (Column(name, overflow="fold") for name in ("id", head, *["service"] * services))
    table = Table("", "score", *long, title=escape(printable(shortened(results.query))), title_justify="left")
    for hit in results.hits:
        caption = hit.item.captions[0] if hit.item.captions else hit.item.picture
        cells = (hit.item.id, caption, *[hit.service] * services)
        table.add_row(str(hit.rank), f"{hit.score:.4f}", *(escape(printable(cell)) for cell in cells))
    Console(highlight=False, emoji=False).print(table)


def _found(index: Index, hit: Hit) -> FoundItem:
    from itm_fast.report import FoundItem

    item = hit.item
    image = item.id if item.side == "images" else item.image
    thumbnail = index.thumbnail(image) if image in index.snapshot.sides["images"].ids else None
    return FoundItem(hit.rank, hit.score, item.id, item.captions, thumbnail)


def _facts(index: Index, found: list[Results]) -> dict[str, object]:
    info = index.info()
    return {
        "Index": index.path,
        "Images": f"{info['images']:,}",
        "Captions": f"{info['captions']:,}",
        "Model": ", ".join(model.name for model in index.members.models),
        "Items scored per query": f"{max((one.scored for one in found), default=0):,}",
    }
