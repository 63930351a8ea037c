"""FDF's cross-model realignment: the feature extractor of one model below the encoder heads of another.

Two models trained with the same settings and different seeds learn unrelated features. This experiment asks where they
diverge. It copies the extractor of the first model and freezes it in evaluation mode. The heads start from the second
model and are trained with its settings, its seed and thus its data order. Schedule and warm-up start again, because the
heads see new features. Afterwards, the images of each model are compared with the texts of each model.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025), Eq 3 and Figure 2.

Inside: `realign`, `cross_table`, `extractor_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from itm_fast import config as settings
from itm_fast import evaluation, models
from itm_fast.data import Vocabulary
from itm_fast.evaluation.scoring import Gallery
from itm_fast.files.messages import shown
from itm_fast.files.processors import set_threads
from itm_fast.models.base import MatchingModel
from itm_fast.nn import BackboneEncoder, BertTextEncoder, PatchEncoder, TextEncoder
from itm_fast.training import run_folder
from itm_fast.training.config import TrainConfig
from itm_fast.training.lock import lock
from itm_fast.training.progress import TrainResult
from itm_fast.training.run import load_data
from itm_fast.training.trainer import Trainer

__all__ = ["cross_table", "extractor_of", "realign"]


def extractor_of(model: MatchingModel) -> dict[str, nn.Module]:
    """Return the modules of a model that form its feature extractor, by name; all other modules are encoder heads.

    For captions, these are word vectors, their dropout and the GRU, or BERT. For images, these are all layers of the
    patch encoder except the last convolution, or the vision model; region features come from the data and have no
    extractor.

    Raises:
        ValueError: the captions of the model have another kind of encoder.
    """
    words, images = getattr(model, "text_encoder", None), getattr(model, "image_encoder", None)
    parts: dict[str, nn.Module] = {}
    if isinstance(words, BertTextEncoder):
        parts["text_encoder.bert"] = words.bert
    elif isinstance(words, TextEncoder):
        parts |= {f"text_encoder.{name}": getattr(words, name) for name in ("embed", "dropout", "rnn")}
    else:
        raise ValueError(f"model: {model.name} has no caption extractor that could be shared")
    if isinstance(images, BackboneEncoder):
        parts["image_encoder.backbone"] = images.backbone
    if isinstance(images, PatchEncoder):
        parts |= {f"image_encoder.layers.{index}": layer for index, layer in enumerate(list(images.layers)[:-1])}
    return parts


def realign(
    first: str,
    second: str,
    out: str,
    *,
    data: str,
    epochs: int | None = None,
    resume: bool = False,
    progress: bool = True,
    **machine: Any,
) -> TrainResult:
    """Train the heads of the run `second` on the extractor of the run `first`, and write the model to `out`.

    Args:
        first, second: run directories of trainings that differ only in their seeds.
        out: the run directory to write.
        data: the data directory.
        epochs: number of passes over the training captions; None: as many as the second run had.
        resume: continue from the last state in `out`. The result is bit for bit that of an uninterrupted run.
        progress: as in `itm_fast.training.train`.
        machine: settings that change results only by rounding, such as `device` and `threads`.

    Raises:
        ValueError: a directory contains no run, the runs differ in more than the seed, `out` is not empty, or, with
            `resume`, `out` has no state of this realignment. Nothing is written in that case.
    """
    config = _config(first, second, out, data, epochs, machine)
    set_threads(config.threads)
    run_folder.check(config, resume=resume)
    model = models.load(second)
    frozen = extractor_of(model)
    copied = extractor_of(models.load(first))
    # The runs hold the vocabulary of BERT, so its folder may be gone.
    own = attrs.evolve(config, bert=None, vocab=str(Path(second) / run_folder.VOCABULARY))
    vocabulary, train_data, validation_data = load_data(own, resume=resume)
    for split in (train_data, validation_data):
        model.prepare(split)
    torch.manual_seed(config.seed)
    for name, part in frozen.items():
        part.load_state_dict(copied[name].state_dict())
        freeze(part)
    trainer = Trainer(config, model, train_data, validation_data, progress=progress)
    with lock(out):
        run_folder.check(config, resume=resume)
        if resume:
            trainer.restore()
        vocabulary.save(run_folder.prepare(config, resume=resume) / run_folder.VOCABULARY)
        return trainer.run()


def freeze(part: nn.Module) -> None:
    """Disable gradients and keep evaluation mode, whatever the mode of the parent module."""
    part.requires_grad_(False).eval()
    for module in part.modules():
        object.__setattr__(module, "train", lambda mode=True, module=module: module)


def _config(
    first: str, second: str, out: str, data: str, epochs: int | None, machine: Mapping[str, Any]
) -> TrainConfig:
    before, config = (run_folder.saved_config(run).resolved() for run in (first, second))
    free = {name for name, field in settings.fields_of(TrainConfig).items() if field.metadata["free_on_resume"]}
    for name, value in settings.to_dict(config).items():
        if name not in free | {"seed", "vocab"} and getattr(before, name) != value:
            raise ValueError(
                f"{first}: was trained with {name} = {shown(getattr(before, name))}, {second} with {value}"
            )
    if config.scenario != "single" or config.conversions is not None:
        raise ValueError(f"{second}: expected a model without companions and conversions")
    for run, one in ((first, before), (second, config)):
        if one.start is not None:
            raise ValueError(f"{run}: expected a model that was trained from random weights, without --start")
    words = [Path(run) / run_folder.VOCABULARY for run in (first, second)]
    if Vocabulary.from_file(words[0]) != Vocabulary.from_file(words[1]):
        raise ValueError(f"{words[1]}: differs from the vocabulary {words[0]}")
    vocab = str(words[1]) if config.bert is None else None
    defaults = {"min_count": settings.fields_of(TrainConfig)["min_count"].default}
    changes = {"data": data, "out": out, "vocab": vocab, "epochs": epochs or config.epochs}
    changes |= {"tensorboard": False, "tracker": None, "tracker_online": False}
    return attrs.evolve(config, **{**changes, **defaults, **machine})


class _Crossed:
    """The images of one model with the captions of another."""

    def __init__(self, images: MatchingModel, captions: MatchingModel) -> None:
        self.images, self.captions = images, captions
        self.encode_images, self.encode_captions, self.score = (
            images.encode_images,
            captions.encode_captions,
            captions.score,
        )

    def modules(self) -> Iterator[nn.Module]:
        yield from self.images.modules()
        yield from self.captions.modules()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.images.parameters()


def cross_table(members: Mapping[str, MatchingModel], dataset: Gallery) -> dict[str, dict[str, float]]:
    """Return the sum of recalls for the images of each model (outer) and the captions of each model (inner), as in
    Figure 2b.
    """
    return {
        images: {
            captions: evaluation.evaluate(_Crossed(first, second), dataset)["rsum"]
            for captions, second in members.items()
        }
        for images, first in members.items()
    }
