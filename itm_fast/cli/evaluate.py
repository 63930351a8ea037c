"""`itm-fast evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    checkpoint: Annotated[Path, typer.Option(metavar="RUN", help="Folder of a trained model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the split.")],
    split: Annotated[str, typer.Option(help="Split to retrieve from.")] = "test",
    folds: Annotated[int, typer.Option(help="Report the mean over so many equal runs of images (COCO 1K: 5).")] = 1,
    first_images: Annotated[int | None, typer.Option(help="Use only the first images and their captions.")] = None,
    vocab: Annotated[Path | None, typer.Option(help="Vocabulary JSON; by default the one in RUN.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    device: Annotated[str, typer.Option(help="Device, for example cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: torch's choice.")] = 0,
) -> None:
    """Recalls of a trained model on a split, image to text and text to image.

    An image's rank is the best over its captions. Equal scores count against the query.
    """
    import sys
    import time

    import torch

    import itm_fast
    from itm_fast import evaluation, files, models
    from itm_fast.data import PrecomputedDataset, Vocabulary
    from itm_fast.training import run_folder
    from itm_fast.training.run import device_of

    if threads:
        torch.set_num_threads(threads)
    model = models.load(checkpoint, device_of(device))
    vocab_path = vocab or checkpoint / run_folder.VOCABULARY
    if not vocab_path.is_file():
        raise ValueError(f"{vocab_path}: no such vocabulary file; name the one of the training with --vocab FILE")
    vocabulary = Vocabulary.from_file(vocab_path)
    expected = getattr(model.config, "vocab_size", len(vocabulary))
    if len(vocabulary) != expected:
        raise ValueError(f"{vocab_path}: {len(vocabulary)} words, but the model in {checkpoint} knows {expected}")
    dataset = PrecomputedDataset(data, split, vocabulary)
    start = time.perf_counter()
    summary = evaluation.evaluate(model, dataset, folds=folds, first_images=first_images, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start

    n_images = first_images or dataset.n_images
    protocol = f"{split}, {n_images} images" + (f" in {folds} folds" if folds > 1 else "")
    typer.echo(evaluation.recall_table({protocol: summary}))
    if json_file is not None:
        result = {
            "checkpoint": str(checkpoint),
            "data": str(data),
            "split": split,
            "images": n_images,
            "folds": folds,
            "ties": "pessimistic",
            "seconds": round(seconds, 3),
            "itm_fast": itm_fast.__version__,
            "torch": torch.__version__,
            **summary,
        }
        files.write_text(json_file, json.dumps(result, indent=2) + "\n")
