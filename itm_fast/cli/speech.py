"""`itm-fast speech`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_fast.cli.models import dataset_of, load_run
from itm_fast.cli.targets import check_targets


def speech(
    checkpoint: Annotated[Path, typer.Option(metavar="RUN", help="Run directory of a trained model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data folder or feature store.")],
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of the captions.")] = "test",
    tags: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parts of speech: a line for each caption of the split, with a tag for each word. Default: NLTK's "
            "tagger, whose data must be installed.",
        ),
    ] = None,
    max_captions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Use this many captions, evenly spread over the split.")
    ] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the images of negative pairs.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Figure to write: .svg, .png or .pdf.")] = Path(
        "speech.svg"
    ),
    vocab: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Vocabulary JSON; default: the one in RUN.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON.")] = None,
) -> None:
    """Plot attention by part of speech: aggregation weights, and distances of positive and negative pairs.

    Each caption is paired with its own image and with another one. The figure shows the mean weight of RAR's
    aggregation in both, and the Wasserstein distance between the cosines of words and what they attend to in both. The
    model must have attention from words to regions. Parts of speech come from --tags FILE, or from NLTK's tagger if its
    data are installed.
    """
    import json

    import torch

    from itm_fast.data import nltk_speech_tags, read_speech_tags
    from itm_fast.evaluation import speech_statistics
    from itm_fast.files import atomic
    from itm_fast.report.comparison import check_suffix
    from itm_fast.report.speech import write_speech

    check_targets(
        {"--out": out, "--json": json_file},
        {"--tags": tags, "--vocab": vocab},
        [("--checkpoint", checkpoint), ("--data", data)],
    )
    check_suffix(out)
    model, vocabulary, _ = load_run(checkpoint, torch.device("cpu"), vocab)
    dataset = dataset_of(data, split, vocabulary, model, checkpoint)
    count = min(max_captions, len(dataset))
    captions = [number * len(dataset) // count for number in range(count)]
    if tags is None:
        of_captions = nltk_speech_tags(dataset, captions)
    else:
        everything = read_speech_tags(tags, dataset)
        of_captions = [everything[caption] for caption in captions]
    try:
        found = speech_statistics(model, dataset, of_captions, captions, seed=seed)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    write_speech(out, found)
    if json_file is not None:
        content = {
            "split": split,
            "captions": count,
            "seed": seed,
            "parts": found.parts,
            "counts": found.counts,
            "positive_weights": found.positive_weights.tolist(),
            "negative_weights": found.negative_weights.tolist(),
            "distances": found.distances.tolist(),
            "mean_distances": found.mean_distances,
        }
        atomic.write_text(json_file, json.dumps(content, indent=1, allow_nan=False) + "\n")
    means = ", ".join(f"{distance:.3f}" for distance in found.mean_distances)
    typer.echo(f"mean distance of positive and negative pairs by attention step: {means}")
    typer.echo(f"figure: {out}")
