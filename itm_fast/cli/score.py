"""`itm-fast score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_fast.cli.score_options import ScoreOptions, TruthOptions, check_used

_MATRIX, _TRUTH, _TESTS, _OUTPUT = "Scores", "Protocol and ground truth", "Intervals and tests", "Output"


def score(
    scores: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Score matrix: images are rows, captions are columns (.npy, .npz, .safetensors, .pt or .pth).",
        ),
    ] = None,
    image_embeddings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Embeddings of the images, in place of a matrix.", rich_help_panel=_MATRIX
        ),
    ] = None,
    caption_embeddings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Embeddings of the captions.", rich_help_panel=_MATRIX),
    ] = None,
    similarity: Annotated[
        str, typer.Option(metavar="NAME", help="Score of two embeddings: cosine or dot.", rich_help_panel=_MATRIX)
    ] = "cosine",
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the array in a file of several; default: the only one with two dimensions.",
            rich_help_panel=_MATRIX,
        ),
    ] = None,
    image_key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the images' array, if it differs.", rich_help_panel=_MATRIX),
    ] = None,
    caption_key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the captions' array, if it differs.", rich_help_panel=_MATRIX),
    ] = None,
    captions_first: Annotated[
        bool,
        typer.Option(
            "--captions-first",
            help="Captions are rows. Without it, a matrix with more rows than columns is read so, with a message.",
            rich_help_panel=_MATRIX,
        ),
    ] = False,
    distances: Annotated[
        bool,
        typer.Option("--distances", help="The lowest number matches best.", rich_help_panel=_MATRIX),
    ] = False,
    caption_image: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Image of each caption, one number from 0 per line or as .npy; default: equally many captions per "
            "image, in the order of the images.",
            rich_help_panel=_MATRIX,
        ),
    ] = None,
    protocol: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Protocol: full (any split), f30k, coco1k (five folds), coco5k, eccv (ECCV Caption), cxc "
            "(Crisscrossed Captions) or pmrp (plausible matches); repeatable. Default: full.",
            rich_help_panel=_TRUTH,
        ),
    ] = None,
    ground_truth: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the files that eccv, cxc or pmrp need, under their published names.",
            rich_help_panel=_TRUTH,
        ),
    ] = None,
    image_ids: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="COCO number of each image, one per line or as .npy, for these protocols.",
            rich_help_panel=_TRUTH,
        ),
    ] = None,
    caption_ids: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="COCO number of each caption, one per line or as .npy.",
            rich_help_panel=_TRUTH,
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Average over N equal parts of the images.", rich_help_panel=_TRUTH),
    ] = None,
    optimistic: Annotated[
        bool,
        typer.Option(
            "--optimistic-ties", help="Do not count ties as errors.", rich_help_panel=_TRUTH
        ),
    ] = False,
    bootstrap: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Resamples of the images for 95 % intervals; 0: none.", rich_help_panel=_TESTS
        ),
    ] = 1000,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Second matrix of the same images and captions: print the measures of the first minus those of the "
            "second, with intervals and p-values.",
            rich_help_panel=_TESTS,
        ),
    ] = None,
    against_key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the array in the file of --against; default: that of --key, and none for .npy.",
            rich_help_panel=_TESTS,
        ),
    ] = None,
    permutations: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Random exchanges of the results of images for the p-values; default: 10000.",
            rich_help_panel=_TESTS,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of resamples and exchanges.", rich_help_panel=_TESTS)
    ] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Data folder or feature store of the scores, for the image of each caption, and for texts and "
            "pictures in --report.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Split of --data; default: test.", rich_help_panel=_OUTPUT)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write an HTML page: measures, warnings, and the queries with the worst ranks.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    rankings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write ranks and best matches of all queries as .npz.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Best matches per query in --rankings; default: 10.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON.", rich_help_panel=_OUTPUT),
    ] = None,
    threads: Annotated[
        int, typer.Option(metavar="N", min=0, help="CPU threads; 0 uses PyTorch's default.", rich_help_panel=_OUTPUT)
    ] = 0,
) -> None:  # fmt: skip
    """Evaluate a score matrix, or two files of embeddings, of any repository.

    Images are rows of a score matrix, captions are columns. Files are read in tiles, so a matrix need not fit into
    memory. No Python objects are loaded.

    For eccv, --ground-truth has eccv_image_to_caption.json and eccv_caption_to_image.json of the package eccv_caption;
    for cxc, sits_test.csv, sts_test.csv and sis_test.csv of Crisscrossed-Captions; for pmrp, instances_val2014.json of
    COCO, or pm_image_to_caption.json and pm_caption_to_image.json of ECCV Caption. Nothing is downloaded.

    Ties count as errors. Warnings name what is suspicious, such as captions as rows, NaN, constant rows, ties by the
    thousand, or captions in another order than the images.
    """
    from itm_fast.cli.score_run import run_score

    if against is None:
        check_used({"--against-key": against_key, "--permutations": permutations}, "--against")
    if data is None:
        check_used({"--split": split}, "--data")
    if rankings is None:
        check_used({"--top": top}, "--rankings")
    run_score(
        ScoreOptions(
            scores=scores, image_embeddings=image_embeddings, caption_embeddings=caption_embeddings,
            similarity=similarity, key=key, image_key=image_key, caption_key=caption_key,
            captions_first=captions_first, distances=distances,
            caption_image=caption_image, protocols=protocol or ["full"], folds=folds,
            truth=TruthOptions(ground_truth, image_ids, caption_ids),
            ties="optimistic" if optimistic else "pessimistic", bootstrap=bootstrap, against=against,
            against_key=against_key, permutations=permutations or 10_000, seed=seed, data=data,
            split=split or "test", report=report, rankings=rankings, top=top or 10,
            json_file=json_file, threads=threads,
        )
    )  # fmt: skip
