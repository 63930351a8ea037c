"""What `itm-fast score` does with its options.

Inside: `run_score`, `score_by_truth`, `truth_ids`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import typer

from itm_fast.cli.score_open import known_captions, open_data, open_scores, open_second, owners_of
from itm_fast.cli.score_options import ScoreOptions, TruthOptions
from itm_fast.cli.score_output import report_protocol, write_rankings
from itm_fast.cli.score_report import write_page
from itm_fast.cli.targets import check_targets

if TYPE_CHECKING:
    from torch import Tensor

    from itm_fast.evaluation.ground_truth import Ids
    from itm_fast.evaluation.score_protocols import Scored
    from itm_fast.evaluation.score_sources import ScoreSource
    from itm_fast.evaluation.suspicion import Look

__all__ = ["run_score", "score_by_truth", "truth_ids"]


def run_score(options: ScoreOptions) -> None:
    """Evaluate the scores, write the files and print the tables."""
    from itm_fast.evaluation.standards import PROTOCOLS, check_sizes, folds_of
    from itm_fast.evaluation.suspicion import captions_per_image
    from itm_fast.files import atomic
    from itm_fast.files.documents import json_text
    from itm_fast.files.processors import set_threads

    _check_targets(options)
    for name in options.protocols:
        folds_of(name, options.folds)
    options.truth.check(options.protocols)
    if all(PROTOCOLS[name].truth for name in options.protocols):
        # Protocols with their own positives always count ties as errors, so their rankings and warnings do, too.
        options = attrs.evolve(options, ties="pessimistic")
    set_threads(options.threads)
    dataset = open_data(options)
    known = known_captions(options, dataset)
    opened = open_scores(options, known)
    source = opened.source
    owners = owners_of(options, source, dataset)
    for name in options.protocols:
        check_sizes(name, source.n_images, source.n_captions, any_captions=known is not None)
    second = None if options.against is None else open_second(options, opened)
    for note in [*opened.notes, *([] if second is None else second.notes)]:
        warnings.warn(note, stacklevel=2)
    results, looked_at, found = _looked(options, source, owners)
    others, against = None, []
    if second is not None:
        others, _, lines = _looked(attrs.evolve(options, rankings=None), second.source, owners)
        # Both matrices have the same captions per image.
        shared = captions_per_image(owners, source.n_images)
        against = [f"{options.against}: {line}" for line in lines if line not in shared]
    for line in [*found, *against]:
        warnings.warn(line, stacklevel=2)
    paths = (options.scores, options.image_embeddings, options.caption_embeddings)
    reports = {
        result.name: report_protocol(
            result,
            None if others is None else (str(options.against), others[number]),
            bootstrap=options.bootstrap,
            permutations=options.permutations,
            seed=options.seed,
        )
        for number, result in enumerate(results)
    }
    content: dict[str, Any] = {
        "scores": [str(path) for path in paths if path is not None],
        "images": source.n_images,
        "captions": source.n_captions,
        "ties": options.ties,
        "warnings": [*opened.notes, *found, *([] if second is None else second.notes), *against],
        "bootstrap": {"samples": options.bootstrap, "seed": options.seed},
        **({} if second is None else {"permutations": options.permutations}),
        "protocols": {name: part for name, (_, part) in reports.items()},
    }
    if options.rankings is not None:
        ranked = [result for result in results if result.rankings] or [looked_at]
        write_rankings(options.rankings, ranked, options.top)
    if options.report is not None:
        write_page(options.report, content, looked_at, source, owners, dataset)
    if options.json_file is not None:
        atomic.write_text(options.json_file, json_text(content))
    # The files come first: the reader of stdout may have closed it.
    for tables, _ in reports.values():
        typer.echo(tables)


def score_by_truth(
    protocols: Sequence[str],
    source: ScoreSource,
    owners: Tensor,
    truth: TruthOptions,
    *,
    folds: int | None = None,
    seed: int = 0,
) -> dict[str, Scored]:
    """Evaluate scores by the protocols whose positives are in files; by name."""
    from itm_fast.evaluation.score_truth import score_truth

    folder, _, _ = truth.paths()
    ids = truth_ids(truth, source.n_images, source.n_captions)
    return {
        name: score_truth(name, source, owners, folder, ids, folds=folds or 1, seed=seed, progress=True)
        for name in protocols
    }


def truth_ids(truth: TruthOptions, n_images: int, n_captions: int) -> Ids:
    """Read the numbers of images and captions; raise ValueError if there are not as many."""
    from itm_fast.evaluation.ground_truth import Ids, read_ids

    _, image_ids, caption_ids = truth.paths()
    return Ids(read_ids(image_ids, n_images, "images"), read_ids(caption_ids, n_captions, "captions"))


def _check_targets(options: ScoreOptions) -> None:
    check_targets(
        {"--json": options.json_file, "--rankings": options.rankings, "--report": options.report},
        {
            "FILE": options.scores,
            "--image-embeddings": options.image_embeddings,
            "--caption-embeddings": options.caption_embeddings,
            "--caption-image": options.caption_image,
            "--against": options.against,
            "--image-ids": options.truth.image_ids,
            "--caption-ids": options.truth.caption_ids,
        },
        [("--data", options.data), ("--ground-truth", options.truth.ground_truth)],
    )


def _looked(options: ScoreOptions, source: ScoreSource, owners: Tensor) -> tuple[list[Scored], Scored, list[str]]:
    """Return the results, the one with rankings that reads the most pairs, and what is suspicious in it."""
    from itm_fast.evaluation.suspicion import Look, suspicions

    look = Look(source.n_images, source.n_captions)
    results = _score(options, source, owners, look)
    looked_at = next((result for result in results if result.name == _least_folded(options)), None)
    if looked_at is None:
        looked_at = _score(attrs.evolve(options, protocols=["full"], folds=1), source, owners, look)[0]
    ranks = [fold.ranks for fold in looked_at.rankings]
    return results, looked_at, suspicions(source, owners, look, ranks, options.ties)


def _score(options: ScoreOptions, source: ScoreSource, owners: Tensor, look: Look) -> list[Scored]:
    from itm_fast.evaluation.score_protocols import score_protocol
    from itm_fast.evaluation.standards import PROTOCOLS

    top = options.top if options.rankings is not None else 0
    by_truth = [name for name in options.protocols if PROTOCOLS[name].truth]
    found: dict[str, Scored] = {}
    if by_truth:
        found = score_by_truth(by_truth, source, owners, options.truth, folds=options.folds, seed=options.seed)
    for name in dict.fromkeys(options.protocols):
        if name not in found:
            found[name] = score_protocol(
                name, source, owners, folds=options.folds, ties=options.ties,
                top=top, look=look if name == _least_folded(options) else None, progress=True,
            )  # fmt: skip
    return [found[name] for name in dict.fromkeys(options.protocols)]


def _least_folded(options: ScoreOptions) -> str | None:
    """Return the protocol with rankings that reads the most pairs: only pairs within a fold are read."""
    from itm_fast.evaluation.standards import PROTOCOLS, folds_of

    ranked = [name for name in options.protocols if not PROTOCOLS[name].truth]
    return min(ranked, key=lambda name: folds_of(name, options.folds), default=None)
