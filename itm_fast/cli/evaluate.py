"""`itm-fast evaluate`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from itm_fast.cli.evaluate_truth import evaluate_truth
from itm_fast.cli.models import dataset_of, load_run
from itm_fast.cli.score_options import TruthOptions
from itm_fast.cli.score_output import interval_table
from itm_fast.cli.targets import check_targets

if TYPE_CHECKING:
    from itm_fast.data import PrecomputedDataset
    from itm_fast.evaluation.ranks import FoldRanks
    from itm_fast.evaluation.score_protocols import Scored
    from itm_fast.models import MatchingModel


class _Precision(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def evaluate(
    checkpoint: Annotated[
        list[Path],
        typer.Option(metavar="RUN", help="Run directory of a trained model; repeat it for an ensemble by mean score."),
    ],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data folder or feature store.")],
    split: Annotated[str, typer.Option(metavar="NAME", help="Split to evaluate.")] = "test",
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Protocol: f30k, coco1k (five folds) or coco5k, which check the sizes; or eccv, cxc or pmrp, which "
            "need --ground-truth and the COCO numbers (see score).",
        ),
    ] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the files that eccv, cxc or pmrp need.")
    ] = None,
    image_ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="COCO number of each image, for these protocols.")
    ] = None,
    caption_ids: Annotated[Path | None, typer.Option(metavar="FILE", help="COCO number of each caption.")] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Average over N equal parts of the images (COCO 1K: 5); default: 1, or the protocol's."
        ),
    ] = None,
    first_images: Annotated[
        int | None, typer.Option(metavar="N", help="Use the first N images and their captions; default: all.")
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming",
            help="Count ranks tile by tile, without the whole score matrix in memory; eccv, cxc and pmrp keep it in a "
            "temporary file.",
        ),
    ] = False,
    rerank: Annotated[
        int | None,
        typer.Option(metavar="K", help="Score only the first K candidates of --candidates in both directions."),
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run directory of the cheap model that orders the candidates.")
    ] = None,
    candidates_data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Data of the cheap model, if its features differ; default: --data."),
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Vocabulary JSON; default: the one in RUN.")
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(metavar="N", min=0, help="Resamples of the images for 95 % intervals; 0: none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the resamples and of cxc's samples.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device, such as cpu or cuda.")] = "cpu",
    precision: Annotated[
        _Precision, typer.Option(metavar="NAME", help="Precision of the forward pass.")
    ] = _Precision.float32,
    threads: Annotated[int, typer.Option(metavar="N", min=0, help="CPU threads; 0 uses PyTorch's default.")] = 0,
) -> None:
    """Compute the retrieval recalls of trained models on a split, image to text and text to image.

    The rank of an image is the best rank of its captions. Ties count against the query. Several models are evaluated
    one by one and as an ensemble by mean score. The intervals are those of the ensemble.

    With --rerank K, a cheap model orders all candidates and the model scores only the first K of each query. The others
    stay behind them in the order of the cheap model.

    Several processes share the work: torchrun --nproc-per-node N -m itm_fast evaluate ...
    """
    import time
    import warnings

    import torch

    import itm_fast
    from itm_fast import evaluation
    from itm_fast.distributed import joined
    from itm_fast.evaluation.measures import recall_measures
    from itm_fast.evaluation.standards import PROTOCOLS, check_sizes, folds_of
    from itm_fast.evaluation.suspicion import captions_per_image
    from itm_fast.files import atomic
    from itm_fast.files.documents import json_text
    from itm_fast.files.processors import device_of, set_threads
    from itm_fast.training.run import warn_of_unknown_words

    check_targets(
        {"--json": json_file},
        {"--vocab": vocab, "--image-ids": image_ids, "--caption-ids": caption_ids},
        [
            *(("--checkpoint", run) for run in checkpoint), ("--candidates", candidates), ("--data", data),
            ("--candidates-data", candidates_data), ("--ground-truth", ground_truth),
        ],
    )  # fmt: skip
    _check_distinct(checkpoint)
    _check_reranking(checkpoint, rerank, candidates, candidates_data)
    n_folds = folds_of(protocol or "full", folds)
    truth = TruthOptions(ground_truth, image_ids, caption_ids)
    by_truth = protocol is not None and PROTOCOLS[protocol].truth
    truth.check([protocol or "full"])
    if by_truth:
        if first_images is not None:
            raise ValueError(f"--protocol {protocol}: needs all images; leave out --first-images")
        if rerank is not None:
            raise ValueError(f"--protocol {protocol}: needs all scores; leave out --rerank")
    set_threads(threads)
    members: list[tuple[MatchingModel, PrecomputedDataset]] = []
    sources = []
    with joined(device) as world:
        with world.together():
            where = device_of(world.device(device))
            for run in checkpoint:
                model, vocabulary, path = load_run(run, where, vocab)
                known = [dataset for _, dataset in members]
                members.append((model, dataset_of(data, split, vocabulary, model, run, known)))
                sources.append({"checkpoint": str(run), "vocabulary": str(path)})
            cheap: list[tuple[MatchingModel, PrecomputedDataset]] = []
            if candidates is not None:
                other, vocabulary, path = load_run(candidates, where, None)
                cheap.append((other, dataset_of(candidates_data or data, split, vocabulary, other, candidates)))
                sources.append({"checkpoint": str(candidates), "vocabulary": str(path)})
            if protocol is not None:
                owners, count = members[0][1].caption_image, first_images or members[0][1].n_images
                owners = owners[owners < count]
                # The data say which image a caption belongs to, so other numbers of captions can be evaluated.
                check_sizes(protocol, count, len(owners), any_captions=True)
                for line in captions_per_image(owners, count):
                    warnings.warn(f"{data}: split {split}: {line}", stacklevel=2)
            for dataset in dict.fromkeys(dataset for _, dataset in members + cheap):
                warn_of_unknown_words(dataset)
        start = time.perf_counter()
        options: dict[str, Any] = {"progress": world.first, "description": split, "world": world}
        options |= {"folds": n_folds, "first_images": first_images}
        ranks: list[FoldRanks] = []
        scored: Scored | None = None
        with torch.autocast(where.type, torch.bfloat16, enabled=precision is _Precision.bfloat16):
            alone: list[dict[str, float]] = []
            if by_truth:
                scored = evaluate_truth(
                    members, str(protocol), truth, n_folds, world, split, streaming=streaming, seed=seed
                )
                ensemble = {} if scored is None else scored.summary
            elif cheap and rerank is not None:
                ensemble, before = evaluation.rerank(*members[0], cheap[0], rerank, found=ranks, **options)
                alone = [ensemble, before]
            else:
                alone, ensemble = evaluation.evaluate_ensemble(members, streaming=streaming, found=ranks, **options)
        seconds = time.perf_counter() - start
    if not world.first:
        return

    n_images = first_images or members[0][1].n_images
    dataset = members[0][1]
    measures = scored.measures if scored else recall_measures(ranks, dataset.caption_image, dataset.n_images)
    ends = evaluation.intervals(measures, samples=bootstrap, seed=seed) if bootstrap else {}
    if json_file is not None:
        result: dict[str, Any] = {
            **(sources[0] if len(checkpoint) == 1 else {}),
            "data": str(data),
            "split": split,
            "images": n_images,
            **({} if protocol is None else {"protocol": protocol}),
            "folds": n_folds,
            "precision": precision.value,
            "ties": "pessimistic",
            "seconds": round(seconds, 3),
            "itm_fast": itm_fast.__version__,
            "torch": torch.__version__,
            **ensemble,
            **({"bootstrap": {"samples": bootstrap, "seed": seed}, "intervals": ends} if ends else {}),
        }
        if rerank is not None:
            result |= {"rerank": rerank, "candidates": {**sources[1], "data": str(candidates_data or data), **alone[1]}}
        elif len(checkpoint) > 1:
            result["members"] = [
                {**source, **summary} for source, summary in zip(sources, alone or [{}] * len(sources), strict=True)
            ]
        atomic.write_text(json_file, json_text(result))
    # The file comes first: the reader of stdout may have closed it.
    title = f"{split}, {n_images} images" + (f" in {n_folds} folds" if n_folds > 1 else "")
    for source in dict.fromkeys(source["vocabulary"] for source in sources):
        typer.echo(f"vocabulary: {source}")
    rows = {title: ensemble}
    if rerank is not None:
        rows = {f"{candidates}, all": alone[1], f"{checkpoint[0]}, first {rerank}": ensemble}
        typer.echo(title)
    elif len(checkpoint) > 1 and not by_truth:
        typer.echo(title)
        rows = {str(run): summary for run, summary in zip(checkpoint, alone, strict=True)}
        rows[f"mean score of {len(checkpoint)}"] = ensemble
    typer.echo(f"{protocol}: {title}" if by_truth else evaluation.recall_table(rows))
    if by_truth or ends:
        typer.echo(interval_table(ensemble, ends, list(ensemble) if by_truth else None))


def _check_reranking(checkpoints: list[Path], k: int | None, candidates: Path | None, data: Path | None) -> None:
    if k is None and candidates is None and data is None:
        return
    if k is None and candidates is None:
        raise ValueError("--candidates-data: expected with --candidates RUN and --rerank K")
    if k is None or candidates is None:
        given, missing = ("--rerank", "--candidates RUN") if k is not None else ("--candidates", "--rerank K")
        raise ValueError(
            f"{given}: expected with {missing}, which says {'which candidates' if k else 'how many'} to score"
        )
    if k < 1:
        raise ValueError(f"--rerank: expected at least 1 candidate per query, got {k}")
    if len(checkpoints) > 1:
        raise ValueError(f"--rerank: expected one --checkpoint, got {len(checkpoints)}")


def _check_distinct(checkpoints: list[Path]) -> None:
    seen = set()
    for run in checkpoints:
        if run.resolve() in seen:
            raise ValueError(f"--checkpoint: {run} was given twice; an ensemble needs different models")
        seen.add(run.resolve())
