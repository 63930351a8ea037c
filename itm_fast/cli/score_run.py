"""What `itm-fast score` does with its options.

Inside: `ScoreOptions`, `run_score`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from itm_fast.cli.score_output import report_protocol, write_rankings
from itm_fast.cli.score_report import SHOWN, write_page

if TYPE_CHECKING:
    from torch import Tensor

    from itm_fast.data import PrecomputedDataset
    from itm_fast.evaluation.opening import Opened
    from itm_fast.evaluation.score_protocols import Scored
    from itm_fast.evaluation.score_sources import ScoreSource
    from itm_fast.evaluation.suspicion import Look

__all__ = ["ScoreOptions", "TruthOptions", "run_score", "score_by_truth"]


@attrs.frozen
class TruthOptions:
    """Files that name more positives than the captions of an image, and the numbers that they use."""

    ground_truth: Path | None
    image_ids: Path | None
    caption_ids: Path | None

    def paths(self) -> tuple[Path, Path, Path]:
        """Return all three; raise ValueError if one was not given."""
        if self.ground_truth is None or self.image_ids is None or self.caption_ids is None:
            raise ValueError(
                "--protocol: eccv, cxc and pmrp need --ground-truth DIR, the folder of their files, and --image-ids "
                "FILE and --caption-ids FILE, the COCO number of each image and caption"
            )
        return self.ground_truth, self.image_ids, self.caption_ids


@attrs.frozen
class ScoreOptions:
    """The options of the command, as it describes them."""

    scores: Path | None
    image_embeddings: Path | None
    caption_embeddings: Path | None
    similarity: str
    key: str | None
    image_key: str | None
    caption_key: str | None
    captions_first: bool
    distances: bool
    caption_image: Path | None
    protocols: list[str]
    folds: int | None
    truth: TruthOptions
    ties: str
    bootstrap: int
    against: Path | None
    permutations: int
    seed: int
    data: Path | None
    split: str
    report: Path | None
    rankings: Path | None
    top: int
    json_file: Path | None
    threads: int


def run_score(options: ScoreOptions) -> None:
    """Evaluate the scores, print the tables and write the files."""
    from itm_fast.data import layout
    from itm_fast.evaluation.standards import PROTOCOLS, check_sizes, folds_of
    from itm_fast.evaluation.suspicion import Look, suspicions
    from itm_fast.files import atomic
    from itm_fast.files.processors import set_threads

    for target in (options.json_file, options.rankings, options.report):
        if target is not None:
            atomic.check_target(target)
    for name in options.protocols:
        folds_of(name, options.folds)
        if PROTOCOLS[name].truth:
            options.truth.paths()
    set_threads(options.threads)
    dataset = _open_data(options)
    known = None if dataset is None else len(dataset)
    if options.caption_image is not None:
        known = len(layout.read_lines(options.caption_image))
    opened = _open(options, known)
    source = opened.source
    owners = _owners(options, source, dataset)
    for name in options.protocols:
        check_sizes(name, source.n_images, source.n_captions, any_captions=known is not None)
    second = None if options.against is None else _open_second(options, opened)
    for note in [*opened.notes, *([] if second is None else second.notes)]:
        warnings.warn(note, stacklevel=2)
    look = Look(source.n_images, source.n_captions)
    results = _score(options, source, owners, look)
    looked_at = next((result for result in results if result.rankings), None)
    if looked_at is None:
        looked_at = _score(attrs.evolve(options, protocols=["full"], folds=1), source, owners, look)[0]
    found = suspicions(source, owners, look, [fold.ranks for fold in looked_at.rankings])
    for line in found:
        warnings.warn(line, stacklevel=2)
    others = None if second is None else _score(options, second.source, owners, None)
    paths = (options.scores, options.image_embeddings, options.caption_embeddings)
    content: dict[str, Any] = {
        "scores": [str(path) for path in paths if path is not None],
        "images": source.n_images,
        "captions": source.n_captions,
        "ties": options.ties,
        "warnings": [*opened.notes, *found],
        "bootstrap": {"samples": options.bootstrap, "seed": options.seed},
        "protocols": {
            result.name: report_protocol(
                result,
                None if others is None else (str(options.against), others[number]),
                bootstrap=options.bootstrap,
                permutations=options.permutations,
                seed=options.seed,
            )
            for number, result in enumerate(results)
        },
    }
    if options.rankings is not None:
        write_rankings(options.rankings, results, options.top)
    if options.report is not None:
        write_page(options.report, content, looked_at, source, owners, dataset)
    if options.json_file is not None:
        atomic.write_text(options.json_file, json.dumps(content, indent=2) + "\n")


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
    from itm_fast.evaluation.ground_truth import Ids, read_ids
    from itm_fast.evaluation.score_truth import score_truth

    folder, image_ids, caption_ids = truth.paths()
    ids = Ids(read_ids(image_ids, source.n_images, "images"), read_ids(caption_ids, source.n_captions, "captions"))
    return {
        name: score_truth(name, source, owners, folder, ids, folds=folds or 1, seed=seed, progress=True)
        for name in protocols
    }


def _score(options: ScoreOptions, source: ScoreSource, owners: Tensor, look: Look | None) -> list[Scored]:
    from itm_fast.evaluation.score_protocols import score_protocol
    from itm_fast.evaluation.standards import PROTOCOLS

    top = max(options.top if options.rankings is not None else 0, SHOWN if options.report is not None else 0)
    by_truth = [name for name in options.protocols if PROTOCOLS[name].truth]
    found: dict[str, Scored] = {}
    if by_truth:
        found = score_by_truth(by_truth, source, owners, options.truth, folds=options.folds, seed=options.seed)
    # The first pass over all tiles also looks at them.
    for name in dict.fromkeys(options.protocols):
        if name not in found:
            found[name] = score_protocol(
                name, source, owners, folds=options.folds, ties=options.ties,
                top=top if look is not None else 0,
                look=None if any(result.rankings for result in found.values()) else look, progress=True,
            )  # fmt: skip
    return [found[name] for name in dict.fromkeys(options.protocols)]


def _open_data(options: ScoreOptions) -> PrecomputedDataset | None:
    """Open the data for texts and pictures; its words are of no interest."""
    from itm_fast.data import Vocabulary, open_split

    return None if options.data is None else open_split(options.data, options.split, Vocabulary(Vocabulary.special))


def _owners(options: ScoreOptions, source: ScoreSource, dataset: PrecomputedDataset | None) -> Tensor:
    """Return the index of the image of each caption."""
    import torch

    from itm_fast.data import layout

    if dataset is not None and (dataset.n_images, len(dataset)) != (source.n_images, source.n_captions):
        raise ValueError(
            f"{options.data}: split {options.split} has {dataset.n_images:,} images and {len(dataset):,} captions, the "
            f"scores have {source.n_images:,} and {source.n_captions:,}: scores of another split?"
        )
    if options.caption_image is not None:
        return torch.from_numpy(layout.read_caption_image(options.caption_image, source.n_images, source.n_captions))
    if dataset is not None:
        return dataset.caption_image
    return torch.arange(source.n_captions) // max(source.n_captions // source.n_images, 1)


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
        images,
        captions,
        options.image_key or options.key,
        options.caption_key or options.key,
        similarity=options.similarity,
        n_captions=n_captions,
    )


def _open_second(options: ScoreOptions, first: Opened) -> Opened:
    from itm_fast.evaluation.opening import open_matrix

    path = options.against
    assert path is not None
    n_images = first.source.n_images
    second = open_matrix(
        path, options.key, captions_first=options.captions_first, distances=options.distances,
        n_captions=first.source.n_captions,
    )  # fmt: skip
    if second.source.n_images != n_images:
        raise ValueError(
            f"{path}: expected scores of the same {n_images:,} images, found {second.source.n_images:,}: scores of "
            "another split?"
        )
    return second
