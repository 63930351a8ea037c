"""`itm-fast explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itm_fast.cli.models import dataset_of, find_picture, load_run
from itm_fast.cli.targets import check_targets

if TYPE_CHECKING:
    import numpy as np

    from itm_fast.data import PrecomputedDataset
    from itm_fast.evaluation import Explanation
    from itm_fast.models import MatchingModel

# Headings by the direction of the model.
_TITLES = {
    ("t2i",): "What the words attend to",
    ("i2t",): "What the regions attend to",
    ("t2i", "i2t"): "What words and regions attend to",
}


def explain(
    checkpoint: Annotated[Path, typer.Option(metavar="RUN", help="Run directory of a trained model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data folder or feature store.")],
    caption: Annotated[int, typer.Option(metavar="C", help="Number of the caption in the split, from 0.")],
    image: Annotated[
        int | None,
        typer.Option(metavar="I", help="Number of the image in the split, from 0; default: the caption's own."),
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of the caption and the image.")] = "test",
    region: Annotated[
        list[int] | None,
        typer.Option(
            metavar="R",
            help="Show the attention of region R, from 1, over the words; repeatable. Default: all.",
        ),
    ] = None,
    picture_file: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Picture of the image, to draw the boxes of its regions on. Default: the one that data import stored.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML page to write.")] = Path("explanation.html"),
    vocab: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Vocabulary JSON; default: the one in RUN.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all weights as JSON.")] = None,
) -> None:
    """Write an HTML page of the attention between one image and one caption.

    The page shows the attention of words over regions and of regions over words at each step of the regulator, and the
    aggregation weights. For a model with one direction, it shows only this one. Attention is drawn over the picture
    if it is known (the bundled emoji, pictures that data import stored), and on the boxes of the regions if the data
    contain them. Other features are shown as tables.
    """
    import math

    import torch

    from itm_fast.evaluation import explain as explain_pair
    from itm_fast.files import atomic
    from itm_fast.files.documents import json_text
    from itm_fast.nn import BackboneEncoder
    from itm_fast.report import PairDirection, PairReport, write_pair

    check_targets(
        {"--out": out, "--json": json_file},
        {"--picture": picture_file, "--vocab": vocab},
        [("--checkpoint", checkpoint), ("--data", data)],
    )
    model, vocabulary, _ = load_run(checkpoint, torch.device("cpu"), vocab)
    dataset = dataset_of(data, split, vocabulary, model, checkpoint)
    if not 0 <= caption < len(dataset):
        raise ValueError(f"--caption: expected a number from 0 to {len(dataset) - 1} in {split}, got {caption}")
    own = int(dataset.caption_image[caption])
    number = own if image is None else image
    if not 0 <= number < dataset.n_images:
        raise ValueError(f"--image: expected a number from 0 to {dataset.n_images - 1} in {split}, got {number}")
    n_regions, grid_side = dataset.region_count(number), None
    if isinstance(encoder := getattr(model, "image_encoder", None), BackboneEncoder):
        n_regions = encoder.regions(encoder.side * math.isqrt(n_regions))
        grid_side = math.isqrt(n_regions)
    for chosen in region or ():
        if not 1 <= chosen <= n_regions:
            raise ValueError(f"--region: expected a number from 1 to {n_regions}, got {chosen}")
    try:
        explanation = explain_pair(model, dataset, caption, number)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    if region and "i2t" not in explanation.directions:
        raise ValueError(f"--region: in {checkpoint} regions do not attend to words")
    boxes = None if dataset.box_source is None or grid_side is not None else dataset.boxes([number])[0].numpy()
    if boxes is not None:
        picture, grid, credits = _boxed_picture(dataset, number, picture_file), (1, 1), ""
    elif picture_file is not None:
        raise ValueError(f"--picture: {data} contains no boxes of the regions, which would be drawn on it")
    else:
        picture, grid, credits = find_picture(dataset, number, grid_side)
    write_pair(
        out,
        PairReport(
            title=_TITLES[tuple(explanation.directions)],
            caption=dataset.captions[caption],
            lead=f"Caption {caption} of {split} beside image {number}, "
            + ("which it belongs to." if number == own else f"which is not its own; that is image {own}."),
            words=explanation.words,
            directions=[
                PairDirection(
                    direction,
                    [weights.numpy() for weights in steps.attention],
                    [temperatures.numpy() for temperatures in steps.temperatures],
                    {name: [step.numpy() for step in weights] for name, weights in steps.aggregation.items()},
                )
                for direction, steps in explanation.directions.items()
            ],
            regions=range(n_regions) if not region else [number - 1 for number in dict.fromkeys(region)],
            picture=picture,
            grid=grid,
            facts=_facts(model, checkpoint, dataset, number, n_regions, explanation),
            credits=credits,
            boxes=boxes,
            note=model.attention_note,
        ),
    )
    if json_file is not None:
        content = {
            "checkpoint": str(checkpoint), "data": str(data), "split": split, "image": number, "caption": caption,
            "words": explanation.words,
            **({} if boxes is None else {"boxes": boxes.tolist()}),
            "directions": {
                direction: {
                    "attention": [weights.tolist() for weights in steps.attention],
                    "temperatures": [temperatures.tolist() for temperatures in steps.temperatures],
                    "aggregation": {
                        name: [step.tolist() for step in weights] for name, weights in steps.aggregation.items()
                    },
                    "score": steps.score.item(),
                }
                for direction, steps in explanation.directions.items()
            },
            "score": explanation.score,
        }  # fmt: skip
        atomic.write_text(json_file, json_text(content))
    typer.echo(f"score {explanation.score:.4f}; page: {out}")


def _boxed_picture(dataset: PrecomputedDataset, image: int, file: Path | None) -> np.ndarray | None:
    """Return the picture of an image with its proportions: that of `file`, or the one in the data, if any."""
    import numpy as np

    from itm_fast.data import whole_picture_of
    from itm_fast.data.picture_files import open_picture
    from itm_fast.data.store_format import BOXED_SIDE

    if file is None:
        return whole_picture_of(dataset, image)
    picture = open_picture(file)
    picture.thumbnail((BOXED_SIDE, BOXED_SIDE))
    return np.asarray(picture)


def _facts(
    model: MatchingModel,
    checkpoint: Path,
    dataset: PrecomputedDataset,
    image: int,
    n_regions: int,
    explanation: Explanation,
) -> list[tuple[str, str]]:
    facts = [("Score of the pair", f"{explanation.score:.4f}")]
    if len(explanation.directions) > 1:
        names = {"t2i": "Score of the words", "i2t": "Score of the regions"}
        facts += [(names[key], f"{steps.score.item():.4f}") for key, steps in explanation.directions.items()]
    regulator = getattr(model.encoder_config, "regulator", None)
    facts.append(("Model", model.name if regulator is None else f"{model.name}, regulator {regulator}"))
    facts.append(("Checkpoint", str(checkpoint)))
    if dataset.image_ids is not None:
        facts.append(("Image", dataset.image_ids[image]))
    facts.append(("Regions", str(n_regions)))
    return facts
