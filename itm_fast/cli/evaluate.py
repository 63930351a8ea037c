"""`itm-fast evaluate`."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class _Precision(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def evaluate(
    checkpoint: Annotated[Path, typer.Option(metavar="RUN", help="Folder of a trained model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the split.")],
    split: Annotated[str, typer.Option(help="Split to retrieve from.")] = "test",
    folds: Annotated[int, typer.Option(help="Report the mean over so many equal runs of images (COCO 1K: 5).")] = 1,
    first_images: Annotated[int | None, typer.Option(help="Use only the first images and their captions.")] = None,
    vocab: Annotated[Path | None, typer.Option(help="Vocabulary JSON; by default the one in RUN.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    device: Annotated[str, typer.Option(help="Device, for example cpu or cuda.")] = "cpu",
    precision: Annotated[_Precision, typer.Option(help="Precision of the forward pass.")] = _Precision.float32,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")] = 0,
) -> None:
    """Recalls of a trained model on a split, image to text and text to image.

    An image's rank is the best over its captions. Equal scores count against the query.
    """
    import time

    import torch

    import itm_fast
    from itm_fast import evaluation, files, models
    from itm_fast.data import PrecomputedDataset, Vocabulary
    from itm_fast.training import run_folder
    from itm_fast.training.run import device_of, warn_of_unknown_words

    if json_file is not None:
        files.check_target(json_file)
    if threads:
        torch.set_num_threads(threads)
    where = device_of(device)
    model = models.load(checkpoint, where)
    own_vocab = checkpoint / run_folder.VOCABULARY
    vocab_path = vocab or own_vocab
    if not vocab_path.is_file():
        raise ValueError(f"{vocab_path}: no such vocabulary file; name the one of the training with --vocab FILE")
    vocabulary = Vocabulary.from_file(vocab_path)
    expected = getattr(model.config, "vocab_size", len(vocabulary))
    if len(vocabulary) != expected:
        raise ValueError(f"{vocab_path}: {len(vocabulary)} words, but the model in {checkpoint} knows {expected}")
    if own_vocab.is_file() and Vocabulary.from_file(own_vocab) != vocabulary:
        raise ValueError(f"{vocab_path}: not the vocabulary that the model was trained with, {own_vocab}")
    dataset = PrecomputedDataset(data, split, vocabulary)
    width = int(dataset.features.shape[2])
    expected = getattr(model.config, "feature_dim", width)
    if width != expected:
        raise ValueError(
            f"{dataset.features_path}: regions of {width} channels, but the model in {checkpoint} takes {expected}"
        )
    warn_of_unknown_words(dataset)
    start = time.perf_counter()
    with torch.autocast(where.type, torch.bfloat16, enabled=precision is _Precision.bfloat16):
        summary = evaluation.evaluate(
            model, dataset, folds=folds, first_images=first_images, progress=True, description=split
        )
    seconds = time.perf_counter() - start

    n_images = first_images or dataset.n_images
    protocol = f"{split}, {n_images} images" + (f" in {folds} folds" if folds > 1 else "")
    typer.echo(f"vocabulary: {vocab_path}")
    typer.echo(evaluation.recall_table({protocol: summary}))
    if json_file is not None:
        result = {
            "checkpoint": str(checkpoint),
            "data": str(data),
            "split": split,
            "images": n_images,
            "folds": folds,
            "vocabulary": str(vocab_path),
            "precision": precision.value,
            "ties": "pessimistic",
            "seconds": round(seconds, 3),
            "itm_fast": itm_fast.__version__,
            "torch": torch.__version__,
            **summary,
        }
        files.write_text(json_file, json.dumps(result, indent=2) + "\n")
