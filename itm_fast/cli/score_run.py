"""What `itm-fast score` does with its options.

Inside: `ScoreOptions`, `run_score`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import typer

if TYPE_CHECKING:
    from torch import Tensor

    from itm_fast.evaluation.bootstrap import Comparison
    from itm_fast.evaluation.opening import Opened
    from itm_fast.evaluation.score_protocols import Scored

__all__ = ["ScoreOptions", "run_score"]


@attrs.frozen
class ScoreOptions:
    """The options of the command, as it describes them."""

    scores: Path | None
    image_embeddings: Path | None
    caption_embeddings: Path | None
    similarity: str
    key: str | None
    captions_first: bool
    distances: bool
    caption_image: Path | None
    protocols: list[str]
    folds: int | None
    ties: str
    bootstrap: int
    against: Path | None
    permutations: int
    seed: int
    rankings: Path | None
    top: int
    json_file: Path | None
    threads: int


def run_score(options: ScoreOptions) -> None:
    """Evaluate the scores, print the tables and write the files."""
    import torch

    from itm_fast.data import layout
    from itm_fast.evaluation.standards import check_sizes, folds_of
    from itm_fast.evaluation.suspicion import Look, suspicions
    from itm_fast.files import atomic
    from itm_fast.files.processors import set_threads

    for target in (options.json_file, options.rankings):
        if target is not None:
            atomic.check_target(target)
    for name in options.protocols:
        folds_of(name, options.folds)
    set_threads(options.threads)
    known = None if options.caption_image is None else len(layout.read_lines(options.caption_image))
    opened = _open(options, known)
    source = opened.source
    owners = torch.arange(source.n_captions) // max(source.n_captions // source.n_images, 1)
    if options.caption_image is not None:
        owners = torch.from_numpy(layout.read_caption_image(options.caption_image, source.n_images, source.n_captions))
    for note in opened.notes:
        _warn(note)
    for name in options.protocols:
        check_sizes(name, source.n_images, source.n_captions, any_captions=known is not None)
    look = Look(source.n_images, source.n_captions)
    results = _score(options, opened, owners, look)
    found = suspicions(source, owners, look, [fold.ranks for fold in results[0].rankings])
    for line in found:
        _warn(line)
    other = None if options.against is None else _score(options, _open_second(options, opened), owners, None)
    content: dict[str, Any] = {
        "scores": [
            str(path)
            for path in (options.scores, options.image_embeddings, options.caption_embeddings)
            if path is not None
        ],
        "images": source.n_images,
        "captions": source.n_captions,
        "ties": options.ties,
        "warnings": [*opened.notes, *found],
        "bootstrap": {"samples": options.bootstrap, "seed": options.seed},
    }
    content["protocols"] = {
        result.name: _report(options, result, None if other is None else other[number])
        for number, result in enumerate(results)
    }
    if options.rankings is not None:
        _write_rankings(options.rankings, results)
    if options.json_file is not None:
        atomic.write_text(options.json_file, json.dumps(content, indent=2) + "\n")


def _open(options: ScoreOptions, n_captions: int | None) -> Opened:
    from itm_fast.evaluation.opening import open_embeddings, open_matrix

    embeddings = (options.image_embeddings, options.caption_embeddings)
    if options.scores is not None and embeddings == (None, None):
        return open_matrix(
            options.scores, options.key, captions_first=options.captions_first, distances=options.distances,
            n_captions=n_captions,
        )  # fmt: skip
    if options.scores is not None or None in embeddings:
        raise ValueError("FILE: give either a score matrix, or --image-embeddings and --caption-embeddings")
    if options.captions_first or options.distances:
        raise ValueError("--captions-first and --distances are for a score matrix, not for embeddings")
    images, captions = (path for path in embeddings if path is not None)
    return open_embeddings(
        images, captions, options.key, options.key, similarity=options.similarity, n_captions=n_captions
    )


def _open_second(options: ScoreOptions, first: Opened) -> Opened:
    from itm_fast.evaluation.opening import open_matrix

    assert options.against is not None
    source = first.source
    second = open_matrix(
        options.against, options.key, captions_first=options.captions_first, distances=options.distances,
        n_captions=source.n_captions,
    )  # fmt: skip
    if second.source.n_images != source.n_images:
        raise ValueError(
            f"{options.against}: expected scores of the same {source.n_images:,} images, found "
            f"{second.source.n_images:,}: scores of another split?"
        )
    for note in second.notes:
        _warn(note)
    return second


def _score(options: ScoreOptions, opened: Opened, owners: Tensor, look: Any) -> list[Scored]:
    from itm_fast.evaluation.score_protocols import score_protocol

    return [
        score_protocol(
            name, opened.source, owners, folds=options.folds, ties=options.ties,
            top=options.top if look is not None and options.rankings is not None else 0,
            look=look if number == 0 else None, progress=True,
        )
        for number, name in enumerate(options.protocols)
    ]  # fmt: skip


def _report(options: ScoreOptions, result: Scored, other: Scored | None) -> dict[str, Any]:
    """Print the tables of a protocol; return its part of the JSON."""
    from itm_fast.evaluation.bootstrap import compare, intervals
    from itm_fast.evaluation.table import recall_table

    content: dict[str, Any] = dict(result.summary)
    typer.echo(recall_table({result.name: result.summary}))
    if options.bootstrap:
        ends = intervals(result.measures, samples=options.bootstrap, seed=options.seed)
        content["intervals"] = {name: list(pair) for name, pair in ends.items()}
    if other is None:
        if options.bootstrap:
            values = dict(zip(result.measures.names, result.measures.values(), strict=True))
            typer.echo("\n" + _interval_table(values, ends))
        return content
    compared = compare(
        result.measures, other.measures, samples=max(options.bootstrap, 1), permutations=options.permutations,
        seed=options.seed,
    )  # fmt: skip
    typer.echo(recall_table({str(options.against): other.summary}))
    typer.echo("\n" + _comparison_table(compared))
    content["against"] = {
        "scores": str(options.against),
        **other.summary,
        "differences": {
            name: {"difference": one.difference, "interval": [one.lowest, one.highest], "p": one.p}
            for name, one in compared.items()
        },
    }
    return content


def _interval_table(values: Mapping[str, float], ends: Mapping[str, tuple[float, float]]) -> str:
    from itm_fast.evaluation.table import measure_table

    rows = [(name, f"{values[name]:.2f}", f"{low:.2f} to {high:.2f}") for name, (low, high) in ends.items()]
    return measure_table(("measure", "value", "95 % interval"), rows)


def _comparison_table(compared: Mapping[str, Comparison]) -> str:
    from itm_fast.evaluation.table import measure_table

    rows = [
        (
            name, f"{one.first:.2f}", f"{one.second:.2f}", f"{one.difference:+.2f}",
            f"{one.lowest:+.2f} to {one.highest:+.2f}", f"{one.p:.4f}",
        )
        for name, one in compared.items()
    ]  # fmt: skip
    return measure_table(("measure", "scores", "against", "difference", "95 % interval", "p"), rows)


def _write_rankings(path: Path, results: list[Scored]) -> None:
    import numpy as np

    from itm_fast.evaluation.ranking import saved_rankings
    from itm_fast.files import atomic

    arrays: dict[str, Any] = {}
    for result in results:
        if result.rankings:
            arrays |= {f"{result.name}_{name}": array for name, array in saved_rankings(result.rankings).items()}
    with atomic.atomic_file(path) as file:
        np.savez(file, **arrays)


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)
