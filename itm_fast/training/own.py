"""What a user may bring to a training: a module, data sets and a loss.

Inside: `OwnModel`, `OwnData`, `SeededData`, `OwnLoss`, `as_model`, `as_data`, `as_loss`, `check_settings`,
`fitting_vocabulary`, `uncompiled`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from itm_fast import config as settings
from itm_fast.data import Batch, CaptionDataset, PrecomputedDataset, Vocabulary
from itm_fast.data.digests import sha256_of_parts
from itm_fast.evaluation.scoring import Gallery
from itm_fast.files.messages import shown
from itm_fast.files.torch_files import READABLE
from itm_fast.fragments import Fragments
from itm_fast.losses import TripletLoss
from itm_fast.models.base import WEIGHTS_FILE, MatchingModel, check_shapes, first_image_weight, shapes_of
from itm_fast.models.weights_file import read_shapes, read_weights, weights_bytes
from itm_fast.training.config import TrainConfig

__all__ = [
    "OwnData",
    "OwnLoss",
    "OwnModel",
    "SeededData",
    "as_data",
    "as_loss",
    "as_model",
    "check_settings",
    "fitting_vocabulary",
    "uncompiled",
]

_ENCODES = ("encode_images", "encode_captions", "score")
# Settings that say how to build or wrap a model of this package.
_OF_BUILT_IN = (
    "bert", "clip", "image_backbone", "conversions", "model_options", "image_frozen_epochs", "text_frozen_epochs",
    "image_checkpointing", "text_checkpointing",
)  # fmt: skip
# Scenarios that do not call the loss of a branch.
_WITH_OWN_LOSSES = ("aoq", "meta_spn", "ncr")
# Separates random numbers of batches from those of the data order, which have the same seed and epoch.
_STREAM = 2
_READS = ("n_images", "caption_image", "image_batch", "caption_batch", "__len__")


class OwnModel(MatchingModel):
    """A module that is no `MatchingModel`, as the trainer uses models.

    Args:
        module: has the methods `encode_images`, `encode_captions` and `score` of `MatchingModel`.
    """

    name = "own"
    saved_files = (WEIGHTS_FILE,)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    def encode_images(self, features: Tensor | Fragments) -> Any:
        return self.module.encode_images(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Any:
        return self.module.encode_captions(token_ids, lengths)

    def score(self, images: Any, captions: Any) -> Tensor:
        """Score by the module; ValueError if it does not return a matrix of images and captions."""
        found: Tensor = self.module.score(images, captions)
        counts = [_count(sets) if isinstance(sets, Tensor | Fragments) else None for sets in (images, captions)]
        shape = tuple(found.shape) if isinstance(found, Tensor) else ()
        if len(shape) != 2 or any(count not in (None, size) for count, size in zip(counts, shape, strict=True)):
            expected = ", ".join(
                name if count is None else str(count) for name, count in zip("nm", counts, strict=True)
            )
            raise ValueError(
                f"model: score: expected a tensor (images, captions) of shape ({expected}), got {_of(found)}"
            )
        return found

    @property
    def scores_within_one(self) -> bool:
        return bool(getattr(self.module, "scores_within_one", True))

    @property
    def scores_are_probabilities(self) -> bool:
        return bool(getattr(self.module, "scores_are_probabilities", True))

    def first_image_weight(self) -> nn.Parameter:
        return first_image_weight(self.module)

    def file_contents(self) -> dict[str, bytes]:
        """Return the weights under the names that the module gives them."""
        return {WEIGHTS_FILE: weights_bytes(self.module.state_dict())}

    def check_saved(self, directory: Path) -> None:
        path = directory / WEIGHTS_FILE
        check_shapes(shapes_of(self.module), read_shapes(path), str(path))
        read_weights(path)


@attrs.define
class _Unplaced:
    """Stands in for the features of a data set that reads them in its own way."""

    in_process: bool = False
    keep_bfloat16: bool = False


class OwnData:
    """A data set that is no `PrecomputedDataset`, as the trainer and its loaders use data sets.

    Args:
        data: a `Gallery`. If it has a method `batch`, it returns the `Batch` of captions by their numbers; otherwise
            `image_batch` and `caption_batch` make it. If it has `caption_lengths`, (n_captions,) int64, captions can be
            sorted by length. If it has a `fingerprint`, a string, a resumed run checks that it is the same.
        split: the name of the split in the log.

    Raises:
        TypeError: `data` lacks a part of a `Gallery`.
        ValueError: `caption_image` does not fit the numbers of images and captions.
    """

    def __init__(self, data: Gallery, split: str) -> None:
        missing = [name for name in _READS if not hasattr(data, name)]
        if missing:
            raise TypeError(f"{split} data: {type(data).__name__} has no {missing[0]}")
        self.data, self.split, self.n_images = data, split, data.n_images
        self.vocabulary: Vocabulary | None = getattr(data, "vocabulary", None)
        source: Any = getattr(data, "source", None)
        # An attribute of that name may be anything.
        self.source: Any = source if hasattr(source, "keep_bfloat16") and hasattr(source, "in_process") else _Unplaced()
        self.caption_image = torch.as_tensor(data.caption_image)
        if self.caption_image.shape != (len(data),) or self.caption_image.dtype != torch.int64:
            raise ValueError(
                f"{split} data: caption_image: expected int64 ({len(data)},), got {self.caption_image.dtype} "
                f"{tuple(self.caption_image.shape)}"
            )
        if len(data) == 0:
            raise ValueError(f"{split} data: expected at least one caption, got none")
        if not 0 <= int(self.caption_image.min()) <= int(self.caption_image.max()) < self.n_images:
            raise ValueError(f"{split} data: caption_image: expected images from 0 to {self.n_images - 1}")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def caption_lengths(self) -> Tensor:
        """Return the number of tokens of each caption, (n_captions,) int64."""
        found = getattr(self.data, "caption_lengths", None)
        if found is None:
            raise ValueError(
                f"bucket_batches: {type(self.data).__name__} has no caption_lengths to sort by; expected 0"
            )
        return torch.as_tensor(found)

    @property
    def makes_batches(self) -> bool:
        """Return whether the data set makes batches in its own way, which may differ from what `image_batch` reads."""
        make = getattr(self.data, "batch", None)
        return make is not None and getattr(make, "__func__", None) is not CaptionDataset.batch

    def image_batch(self, image_indices: Tensor) -> Any:
        """Read images; see `Gallery`. TypeError, ValueError: they are no tensor or `Fragments`, or not as many."""
        found = self.data.image_batch(image_indices)
        self._check("image_batch", "a tensor or Fragments", found, len(image_indices))
        return found

    def caption_batch(self, caption_indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read captions; see `Gallery`. TypeError, ValueError: they are no two tensors, or not as many."""
        found = self.data.caption_batch(caption_indices)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"{self.split} data: caption_batch: expected two tensors, token_ids and lengths, got {_of(found)}"
            )
        token_ids, lengths = found
        self._check("caption_batch: token_ids", "a tensor", token_ids, len(caption_indices))
        self._check("caption_batch: lengths", "a tensor", lengths, len(caption_indices))
        return token_ids, lengths

    def _check(self, what: str, expected: str, found: Any, count: int) -> None:
        # Other objects may know how to go to a device, too; only tensors and Fragments are counted.
        if not hasattr(found, "to"):
            raise TypeError(f"{self.split} data: {what}: expected {expected}, got {_of(found)}")
        if isinstance(found, Tensor | Fragments) and _count(found) != count:
            raise ValueError(f"{self.split} data: {what}: expected {count}, as many as indices, got {_of(found)}")

    def batch(self, caption_indices: np.ndarray) -> Batch:
        """Return captions and the image of each; TypeError, ValueError: the data set's own batch is no such one."""
        make = getattr(self.data, "batch", None)
        if make is not None:
            found = make(caption_indices)
            if not isinstance(found, Batch):
                raise TypeError(f"{self.split} data: batch: expected a Batch, got {_of(found)}")
            for field in attrs.fields(Batch):
                name = field.name
                expected = "a tensor or Fragments" if name == "features" else "a tensor"
                self._check(f"batch: {name}", expected, getattr(found, name), len(caption_indices))
            return found
        captions = torch.from_numpy(caption_indices)
        images = self.caption_image[captions]
        return Batch(self.image_batch(images), *self.caption_batch(captions), images, captions)

    def fingerprints(self) -> dict[str, str]:
        """Return a digest of what is known of the data, by name."""
        parts = (str(self.n_images), self.split, str(getattr(self.data, "fingerprint", "")))
        known = sha256_of_parts(self.caption_image.numpy().tobytes(), *(part.encode() for part in parts))
        return {f"{self.split} data": known}


@attrs.define
class SeededData:
    """Batches of a user's data whose random numbers depend only on seed, epoch and captions.

    So a resumed run draws the same for each batch as an uninterrupted one, with any number of workers.

    Attributes:
        data: the data set.
        seed, epoch: non-negative integers.
        source: says that batches are not read in a second thread. It would draw from the generator of the training
            step.
    """

    data: OwnData
    seed: int
    epoch: int
    source: _Unplaced = attrs.field(factory=_Unplaced, init=False)

    def batch(self, caption_indices: np.ndarray) -> Batch:
        """Return captions and the image of each; torch's generator of the CPU is afterwards as it was before."""
        # An epoch has each caption once, so the first one identifies a batch, also among those of several processes.
        mixed = np.random.SeedSequence([_STREAM, self.seed, self.epoch, int(caption_indices[0])])
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the generators of GPUs, which dropout draws from.
            torch.default_generator.manual_seed(int(mixed.generate_state(1, np.uint64)[0]))
            return self.data.batch(caption_indices)


class OwnLoss(nn.Module):
    """A function of the scores as a loss of the trainer.

    Args:
        function: called with the scores (B, B), images in rows and matching pairs on the diagonal. A parameter
            `positives` receives a mask: bool (B, B), True for further pairs that are no negatives, or None. A module is
            trained with the model.

    Raises:
        TypeError: `function` cannot be called; in `forward`, it returned something else than a scalar tensor.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        if isinstance(function, type):
            raise TypeError(f"loss: expected a function of the scores, got a class; pass {function.__name__}(...)")
        if not callable(function):
            raise TypeError(
                f"loss: expected a function of the scores, got {shown(function)}; name a loss in TrainConfig(loss=...)"
            )
        self.function = function
        self.copies: int = getattr(function, "copies", 1)  # As of `SelfExpandingLoss`.
        called = function.forward if isinstance(function, nn.Module) else function
        try:
            self._takes_positives = "positives" in inspect.signature(called).parameters
        except ValueError:  # A function without a signature, such as one written in C.
            self._takes_positives = False

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar."""
        found: Any = self.function(scores, positives=positives) if self._takes_positives else self.function(scores)
        if not isinstance(found, Tensor) or found.dim():
            shape = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(f"loss: expected a scalar tensor, got {shape}")
        return found


def _count(sets: Tensor | Fragments) -> int | None:
    return len(sets) if isinstance(sets, Fragments) or sets.dim() else None


def _of(value: object) -> str:
    """Describe a value for a message: the shape of a tensor, else the type."""
    if isinstance(value, Fragments):
        return f"Fragments of {len(value)} sets"
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a value of type {type(value).__name__}"
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, and any other as it is: its methods and names are needed."""
    wrapped = getattr(model, "_orig_mod", model)
    return wrapped if isinstance(wrapped, nn.Module) else model


def as_model(model: nn.Module) -> MatchingModel:
    """Return a `MatchingModel` as it is, and another module as an `OwnModel`.

    Raises:
        TypeError: it is no module, or lacks a method.
        ValueError: no weight can be trained, or a checkpoint cannot hold one of its parameters or buffers.
    """
    if isinstance(model, type):
        raise TypeError(f"model: expected a torch.nn.Module, got a class; pass {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {shown(model)}")
    model = uncompiled(model)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(f"model: {type(model).__name__} has no weight to train")
    for name, entry in model.state_dict().items():
        if not isinstance(entry, Tensor):
            raise ValueError(
                f"model: the entry {name} of its state_dict is no tensor, and could not be saved; keep it in a buffer"
            )
    _check_entries(model, "model")
    if isinstance(model, MatchingModel):
        return model
    missing = [name for name in _ENCODES if not callable(getattr(model, name, None))]
    if missing:
        raise TypeError(f"model: {type(model).__name__} has no method {missing[0]}")
    return OwnModel(model)


def _check_entries(module: nn.Module, what: str) -> None:
    """Raise ValueError naming a tensor of `module` that a checkpoint cannot restore, before a run is trained."""
    for name, entry in module.state_dict().items():
        if not isinstance(entry, Tensor):
            continue
        if entry.layout is not torch.strided:
            reason = f"is {str(entry.layout).removeprefix('torch.')}, and only dense tensors can be resumed"
        elif entry.dtype not in READABLE:
            reason = f"has the type {str(entry.dtype).removeprefix('torch.')}, which cannot be resumed"
        elif any(stride == 0 and size > 1 for stride, size in zip(entry.stride(), entry.shape, strict=True)):
            reason = "repeats values in memory, as expand does, and cannot be resumed; call contiguous() first"
        else:
            continue
        raise ValueError(
            f"{what}: the entry {name} of its state_dict {reason}; a buffer that never changes may have "
            "persistent=False"
        )


def check_settings(
    config: TrainConfig, model: MatchingModel, data: PrecomputedDataset | OwnData, *, own_loss: bool = False
) -> None:
    """Raise ValueError naming a setting that does not go with a user's own module, data set or loss."""
    if isinstance(model, OwnModel):
        defaults = {name: field.default for name, field in settings.fields_of(type(config)).items()}
        for name in _OF_BUILT_IN:
            value = getattr(config, name)
            if value and value != defaults[name]:
                raise ValueError(f"{name}: expected none with your own module, got {shown(value)}")
        if config.scenario not in ("single", "mss"):
            raise ValueError(f"scenario: expected single or mss with your own module, got {config.scenario}")
    if isinstance(data, OwnData) and config.picture_augmentation != "none":
        raise ValueError(
            "picture_augmentation: expected none with your own data set, which can augment in its method batch"
        )
    if own_loss and config.scenario in _WITH_OWN_LOSSES:
        raise ValueError(f"loss: the scenario {config.scenario} has losses of its own and cannot take yours")
    realigned = config.realignment and (config.conversions or 0) > 1 and config.other_batches != "none"
    if own_loss and realigned:
        raise ValueError(
            "loss: the realignment of several conversions has losses of its own and cannot take yours; with "
            "realignment=False, yours trains the fused feature"
        )


def as_data(data: Gallery, split: str) -> PrecomputedDataset | OwnData:
    """Return a `PrecomputedDataset` as it is, and another data set as `OwnData` with the name `split`."""
    return data if isinstance(data, PrecomputedDataset | OwnData) else OwnData(data, split)


def as_loss(loss: Callable[..., Tensor]) -> nn.Module:
    """Return a `TripletLoss` as it is, because one kernel computes it with the scores, and another one as `OwnLoss`.

    Raises:
        ValueError: a checkpoint cannot hold its parameters or buffers.
    """
    if isinstance(loss, nn.Module):
        _check_entries(loss, "loss")
    return loss if type(loss) is TripletLoss else OwnLoss(loss)


def fitting_vocabulary(model: MatchingModel, data: PrecomputedDataset | OwnData) -> Vocabulary | None:
    """Return the vocabulary of the captions if it can be saved with the model, which must know as many words."""
    words = data.vocabulary
    if not isinstance(words, Vocabulary) or not words.saveable:
        return None
    config = getattr(model, "encoder_config", None)
    return words if getattr(config, "vocab_size", len(words)) == len(words) else None
