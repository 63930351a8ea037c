"""`itm-fast data import`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from itm_fast.data import Vocabulary

# As many are printed; the file names all.
_PRINTED = 10
SKIPPED, DUPLICATES = "skipped.txt", "duplicates.txt"


class _Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class _Format(str, Enum):
    jpeg = "jpeg"
    webp = "webp"


def import_command(
    images: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of pictures in any format that Pillow reads, and its subfolders."),
    ],
    captions: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Captions: .csv or .tsv with columns image, caption and optionally split; .jsonl with these keys; or "
            "the .json of COCO or Karpathy.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="STORE", help="Folder of the feature store; created if missing.")],
    encoder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Local folder of a ViT, DeiT, Swin, DINOv2, CLIP or SigLIP, written by transformers, or of a model of "
            "timm: its patch tokens become the regions. Or of a Faster R-CNN of torchvision: the regions that it "
            "detects, with their boxes. Default: store the pictures, without features.",
        ),
    ] = None,
    layer: Annotated[
        int,
        typer.Option(
            metavar="N", help="Hidden state of the encoder to store; 0 is the embeddings, -1 the encoder's output."
        ),
    ] = -1,
    pool: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Regions of a picture: patches (each patch), class (the class token), mean (of all patches), or "
            "averages over a grid such as 7x7.",
        ),
    ] = "patches",
    regions: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="With a Faster R-CNN: maximum regions of a picture.")
    ] = 36,
    min_regions: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1000, help="With a Faster R-CNN: regions to keep below --confidence."),
    ] = 1,
    confidence: Annotated[
        float,
        typer.Option(metavar="X", min=0, max=1, help="With a Faster R-CNN: leave out regions of a lower confidence."),
    ] = 0.0,
    split: Annotated[
        str,
        typer.Option(
            metavar="X,X,X", help="Shares of the pictures in train, dev and test, if the captions name no splits."
        ),
    ] = "0.8,0.1,0.1",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the split.")] = 0,
    dtype: Annotated[_Dtype, typer.Option(metavar="NAME", help="Number format of the stored features.")] = _Dtype.bf16,
    size: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=4096, help="Without --encoder: height and width of the pictures in pixels."
        ),
    ] = 224,
    stretch: Annotated[
        bool,
        typer.Option(
            "--stretch",
            help="Without --encoder: scale height and width to --size each, as LAPS and SigLIP do. Default: scale the "
            "shorter edge, and crop the centre.",
        ),
    ] = False,
    grid: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=256, help="Without --encoder: cut pictures into N x N patches, each a region."
        ),
    ] = 7,
    picture_format: Annotated[
        _Format, typer.Option("--format", metavar="NAME", help="Format of stored pictures, jpeg or webp.")
    ] = _Format.jpeg,
    quality: Annotated[
        int, typer.Option(metavar="N", min=1, max=100, help="Quality of stored pictures, 1 to 100.")
    ] = 90,
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures/--no-pictures", help="With --encoder: store the pictures, too, so that explain draws them."
        ),
    ] = True,
    vocab: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Vocabulary JSON, vocab.txt of a BERT, or the folder of a BERT, CLIP or SigLIP. Default: built from "
            "the captions of train.",
        ),
    ] = None,
    min_count: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Minimum occurrences of a word in a vocabulary that is built. Default: 4.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=3,
            help="Treat captions of more than N tokens of the vocabulary as bad; start and end count, too. Default: no "
            "limit.",
        ),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out and list bad pictures and captions, instead of stopping.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that decode pictures. Default: one per processor, at most 16."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device of the encoder, such as cuda.")] = "cpu",
) -> None:
    """Turn a folder of pictures with captions into a store, which train, evaluate and explain read.

    Splits that are drawn share no picture and no copy of one. Near-identical pictures in different splits are listed.
    Nothing is downloaded. Run the same command again to continue an interrupted one.
    """
    from tqdm import tqdm

    from itm_fast.cli.next_command import next_command
    from itm_fast.cli.train import REPORTED
    from itm_fast.data.import_pictures import import_features, import_pictures, import_regions
    from itm_fast.data.pack import check_target
    from itm_fast.data.picture_folder import collect
    from itm_fast.data.preprocessing import KeptProportions, Preprocessing
    from itm_fast.data.store_format import BOXED_SIDE, PICTURES_FOLDER
    from itm_fast.data.vocabulary import MIN_COUNT, check_min_count
    from itm_fast.files import atomic, processors
    from itm_fast.files.processors import device_of
    from itm_fast.models.detector_folder import is_detector_folder, load_detector
    from itm_fast.models.vision_folder import load_picture_encoder
    from itm_fast.training.cautions import few_images

    processes = min(processors.available(), 16) if workers is None else workers
    processors.check_count("workers", processes)
    check_target(out)
    if min_count is not None:
        check_min_count(min_count, vocab)
    words = None if vocab is None else _vocabulary(vocab)
    shares = _shares(split)
    where = device_of(device)
    vision = detector = None
    if encoder is not None and (size, stretch, grid) != (224, False, 7):
        raise ValueError(
            "--size, --stretch, --grid: expected only without --encoder, whose folder says how pictures are scaled"
        )
    if encoder is None and (layer, pool, dtype) != (-1, "patches", _Dtype.bf16):
        raise ValueError("--layer, --pool, --dtype: expected only with --encoder")
    if encoder is not None and is_detector_folder(encoder):
        if (layer, pool) != (-1, "patches"):
            raise ValueError(f"--layer, --pool: expected neither, as {encoder} is a Faster R-CNN")
        detector = load_detector(encoder, regions=regions, min_regions=min_regions, confidence=confidence, device=where)
    elif (regions, min_regions, confidence) != (36, 1, 0.0):
        raise ValueError("--regions, --min-regions, --confidence: expected only with a Faster R-CNN as --encoder")
    elif encoder is not None:
        vision = load_picture_encoder(encoder, layer=layer, pool=pool, device=where)
    elif size % grid:
        raise ValueError(f"--grid: expected a divisor of --size {size}, got {grid}")
    found = collect(
        images, captions, shares=shares, seed=seed, skip_bad=skip_bad, max_tokens=max_tokens, vocabulary=words,
        workers=processes, progress=True,
    )  # fmt: skip
    if found.duplicates:
        # Encoding takes long, so they come before it.
        several = "s" * (len(found.duplicates) > 1)
        _list(f"pair{several} of near-identical pictures in different splits (full list after the import: "
              f"{out / DUPLICATES})", found.duplicates)  # fmt: skip
    common: dict[str, Any] = {
        "vocabulary": words, "min_count": min_count or MIN_COUNT, "workers": processes, "progress": True,
    }  # fmt: skip
    compressed: dict[str, Any] = {**common, "dtype": picture_format.value, "quality": quality}
    scaling: Preprocessing | KeptProportions | None = None
    if detector is not None:
        manifest = import_regions(found.splits, captions, out, detector, dtype=dtype.value, **common)
        scaling = KeptProportions(BOXED_SIDE)
    elif vision is not None:
        manifest = import_features(found.splits, captions, out, vision, dtype=dtype.value, **common)
        scaling = vision.preprocessing
    else:
        square = Preprocessing(size, shortest_edge=None if stretch else size)
        manifest = import_pictures(found.splits, captions, out, square, grid=grid, **compressed)
    if pictures and scaling is not None:
        import_pictures(found.splits, captions, out / PICTURES_FOLDER, scaling, grid=1, **compressed)
    for record in manifest.splits:
        size_bytes = tqdm.format_sizeof(sum(shard.bytes for shard in record.shards), "B")
        regions_each = f"{'up to ' * record.ragged}{record.regions} regions of {record.width} numbers"
        typer.echo(
            f"{record.name}: {record.images:,} pictures, {record.captions:,} captions, {regions_each}, {size_bytes}"
        )
    if found.skipped:
        atomic.write_text(out / SKIPPED, "".join(f"{line}\n" for line in found.skipped))
        one = "picture or caption" if len(found.skipped) == 1 else "pictures or captions"
        _list(f"{one} left out (full list: {out / SKIPPED})", found.skipped)
    if found.duplicates:
        atomic.write_text(out / DUPLICATES, "".join(f"{line}\n" for line in found.duplicates))
    # train is left out: models are not chosen by it.
    few = few_images({record.name: record.images for record in manifest.splits if record.name != "train"})
    if few is not None:
        warnings.warn(few, stacklevel=2)
    names = [record.name for record in manifest.splits]
    report = " --report" if REPORTED in names and (encoder is None or pictures) else ""
    typer.echo(next_command(names, out, report))


def _vocabulary(path: Path) -> Vocabulary:
    from itm_fast.data import TokenizerVocabulary, Vocabulary
    from itm_fast.models.bert_folder import bert_vocabulary_file
    from itm_fast.models.pretrained_folder import read_config
    from itm_fast.nn.clip_encoders import CLIP_KINDS

    if not path.is_dir():
        return Vocabulary.from_file(path)
    _, kind = read_config(path / "config.json", ("bert", *CLIP_KINDS), "a BERT, CLIP or SigLIP")
    return Vocabulary.from_file(bert_vocabulary_file(path)) if kind == "bert" else TokenizerVocabulary.from_folder(path)


def _shares(text: str) -> list[float]:
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ValueError(f"--split: expected three shares such as 0.8,0.1,0.1, got {text}") from None


def _list(title: str, lines: Sequence[str]) -> None:
    from itm_fast.files.messages import printable

    typer.echo(f"{len(lines):,} {title}:")
    for line in lines[:_PRINTED]:
        typer.echo(f"  {printable(line)}")
    if len(lines) > _PRINTED:
        typer.echo("  ...")
