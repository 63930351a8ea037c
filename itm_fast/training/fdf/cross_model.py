"""FDF's cross-model realignment: one model's feature extractor below the encoder heads of another.

Two models of the same settings and other seeds learn features that have little to do with each other. The experiment
asks where they part: the extractor of the first is copied and frozen, in evaluation mode, the heads start from the
second and are trained on, with the second's settings, its seed and so the order of its data. Epochs and steps of
warm-up come again: what the heads see is new to them. Then images of each model are compared with the texts of each.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025), Eq 3 and Figure 2.

Inside: `realign`, `cross_table`, `pooled_features`, `extractor_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from itm_fast import config as settings
from itm_fast import evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.evaluation.scoring import Gallery, evaluation_mode
from itm_fast.files.messages import shown
from itm_fast.files.processors import set_threads
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.nn import BertTextEncoder, PatchEncoder, TextEncoder, mean_pool
from itm_fast.training import run_folder
from itm_fast.training.config import TrainConfig
from itm_fast.training.lock import lock
from itm_fast.training.progress import TrainResult
from itm_fast.training.run import load_data
from itm_fast.training.trainer import Trainer

__all__ = ["cross_table", "extractor_of", "pooled_features", "realign"]


def extractor_of(model: MatchingModel) -> dict[str, nn.Module]:
    """The parts of a model that are its feature extractor, by name; all others are encoder heads.

    Word vectors, their dropout and the GRU, or BERT; of the encoder of patches all but the last convolution. Regions
    come from the data otherwise, and have none.

    Raises:
        ValueError: the model reads captions by something else.
    """
    words, images = getattr(model, "text_encoder", None), getattr(model, "image_encoder", None)
    parts: dict[str, nn.Module] = {}
    if isinstance(words, BertTextEncoder):
        parts["text_encoder.bert"] = words.bert
    elif isinstance(words, TextEncoder):
        parts |= {f"text_encoder.{name}": getattr(words, name) for name in ("embed", "dropout", "rnn")}
    else:
        raise ValueError(f"model: {model.name} has no extractor of captions that could be shared")
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
    """Trains the heads of the run `second` above the extractor of the run `first`, and leaves the model in `out`.

    Args:
        first, second: RUN folders of trainings that differ in their seeds alone.
        out: the RUN folder to write.
        data: the folder of their data.
        epochs: passes over the training captions; None: as many as the second run had.
        resume: continue in `out` from the last state there; it ends bit for bit where an uninterrupted one does.
        progress: as in `itm_fast.training.train`.
        machine: other settings that a result does not depend on but for rounding, such as `device` and `threads`.

    Raises:
        ValueError: a folder holds no run, the runs differ in more than the seed, or `out` holds something already, or
            with `resume` no state of this realignment; nothing is written then.
    """
    config = _config(first, second, out, data, epochs, machine)
    set_threads(config.threads)
    run_folder.check(config, resume=resume)
    model = models.load(second)
    frozen = extractor_of(model)
    copied = extractor_of(models.load(first))
    vocabulary, train_data, validation_data = load_data(config, resume=resume)
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
    """No gradient, and evaluation mode whatever the mode of what it is part of."""
    part.requires_grad_(False).eval()
    for module in part.modules():
        object.__setattr__(module, "train", lambda mode=True, module=module: module)


def _config(
    first: str, second: str, out: str, data: str, epochs: int | None, machine: Mapping[str, Any]
) -> TrainConfig:
    before, config = run_folder.saved_config(first), run_folder.saved_config(second)
    free = {name for name, field in settings.fields_of(TrainConfig).items() if field.metadata["free_on_resume"]}
    for name, value in settings.to_dict(config).items():
        if name not in free | {"seed", "vocab"} and getattr(before, name) != value:
            raise ValueError(
                f"{first}: was trained with {name} = {shown(getattr(before, name))}, {second} with {value}"
            )
    if config.scenario != "single" or config.conversions is not None:
        raise ValueError(f"{second}: expected a model that was trained alone, without conversions")
    words = [Path(run) / run_folder.VOCABULARY for run in (first, second)]
    if Vocabulary.from_file(words[0]) != Vocabulary.from_file(words[1]):
        raise ValueError(f"{words[1]}: is another vocabulary than {words[0]}")
    vocab = str(words[1]) if config.bert is None else None
    defaults = {"min_count": settings.fields_of(TrainConfig)["min_count"].default}
    changes = {"data": data, "out": out, "vocab": vocab, "epochs": epochs or config.epochs, "tensorboard": False}
    return attrs.evolve(config, **{**changes, **defaults, **machine})


class _Crossed:
    """Images by one model and captions by another."""

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
    """The sum of recalls of the images of each model (outer) with the captions of each (inner): Figure 2b."""
    return {
        images: {
            captions: evaluation.evaluate(_Crossed(first, second), dataset)["rsum"]
            for captions, second in members.items()
        }
        for images, first in members.items()
    }


def pooled_features(
    members: Mapping[str, MatchingModel], dataset: PrecomputedDataset, count: int = 200
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each model vectors (n, d) of the first `count` images and of their first captions; means of fragments."""
    images = torch.arange(min(count, dataset.n_images))
    captions = torch.tensor([int((dataset.caption_image == image).nonzero()[0]) for image in images])
    found = {}
    for name, model in members.items():
        with evaluation_mode(model):
            sides = (
                model.encode_images(dataset.image_batch(images)),
                model.encode_captions(*dataset.caption_batch(captions)),
            )
        pooled = [mean_pool(side) if isinstance(side, Fragments) else side for side in sides]
        found[name] = (pooled[0].cpu(), pooled[1].cpu())
    return found
