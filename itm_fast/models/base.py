"""The base class of all models: encode, score, save and load.

Inside: `MatchingModel`, `register`, `create`, `load`, `read_config`, `names`, `model_class`, `config_class`,
`first_image_weight`.
"""

from __future__ import annotations

import abc
import functools
import importlib
import json
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from itm_fast import config as settings
from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files import atomic, regular
from itm_fast.files.documents import MAX_SETTINGS_BYTES, read_json
from itm_fast.files.formats import Format
from itm_fast.files.messages import shortened, shown
from itm_fast.files.plugins import Plugins
from itm_fast.files.run_files import VOCABULARY
from itm_fast.fragments import Fragments
from itm_fast.models.hub import HubModel
from itm_fast.models.weights_file import check_finite, missing, read_shapes, read_weights, weights_bytes
from itm_fast.nn import AttentionScores, BertTextEncoder, micro_batches

FORMAT = Format()
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

Embeddings = Fragments | Tensor


class MatchingModel(HubModel, nn.Module, abc.ABC):
    """An image-text matching model: two encoders and a score.

    The encoders return `Fragments`, or a tensor (n, d) for a model with one vector per item. A gallery can be encoded
    once and scored many times.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""  # One line: what the model is, and its paper.
    Config: ClassVar[type]
    # What the attention of `pair_steps` means, for readers of a page; "": weights of a softmax over regions or words.
    attention_note: ClassVar[str] = ""
    # The submodules that `score` runs. Their batch statistics, if any, cover all images with one caption.
    scoring_parts: ClassVar[tuple[str, ...]] = ()
    # The files that `save` writes for a model without a tokenizer.
    saved_files: ClassVar[tuple[str, ...]] = (CONFIG_FILE, WEIGHTS_FILE)
    config: Any
    # The vocabulary of the captions; `load` sets it if the folder holds one.
    tokenizer: Vocabulary | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a model's encoders accept arrays and strings, and its `score` build no autograd graph in inference."""
        super().__init_subclass__(**options)
        if _overrides_scores(cls):
            cls.attention_scores = MatchingModel.attention_scores  # type: ignore[method-assign]
        for name, wrapped in (("encode_images", _of_arrays), ("encode_captions", _of_text), ("score", _of_inference)):
            if name in vars(cls):
                setattr(cls, name, wrapped(vars(cls)[name]))

    @classmethod
    def from_folder(cls, directory: str | os.PathLike[str], device: torch.device | str = "cpu") -> MatchingModel:
        """Read what `save` wrote, as `itm_fast.models.load` does: a model of any class."""
        return load(directory, device)

    @abc.abstractmethod
    def encode_images(self, features: Tensor | Fragments) -> Any:
        """Encode images.

        Args:
            features: region features (n, k, f), or Fragments of n sets. A NumPy array is copied to the device of the
                model and encoded without an autograd graph.

        Returns:
            The embeddings of n images: Fragments, a tensor, or a tuple of these.
        """

    @abc.abstractmethod
    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Embeddings:
        """Encode captions.

        Args:
            token_ids: padded token ids (n, L) int64; or n strings, which the model's `tokenizer` splits, and which are
                encoded without an autograd graph.
            lengths: (n,) int64, the number of tokens of each caption. Leave it out for strings.

        Returns:
            The embeddings of n captions.
        """

    @abc.abstractmethod
    def score(self, images: Any, captions: Any) -> Tensor:
        """Score embeddings of images and captions: (n_images, n_captions) float32, images are rows.

        In evaluation mode, embeddings without an autograd graph give scores without one.
        """

    @property
    def attention_scores(self) -> AttentionScores | None:
        """Return the cross-attention that `score` consists of, in one direction or both, or None.

        Training then computes scores and triplet loss in one call, without calling `score`, `forward` or `observe`. A
        subclass that overrides one of these, itself or by a mixin, returns None unless it overrides this property, too.
        """
        return None

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Split captions into padded token ids (n, L) int64 and lengths (n,) int64, on the device of the model.

        Raises:
            TypeError: `captions` is not a list of strings.
            ValueError: the model has no tokenizer, or a caption has more tokens than the model reads.
        """
        if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
            raise TypeError(f"captions: expected a list of strings, or token ids and lengths, got {shown(captions)}")
        if self.tokenizer is None:
            raise ValueError(
                "tokenizer: the model has none; load it from a run directory, or set it to the Vocabulary it was "
                "trained with"
            )
        encoded = [torch.tensor(self.tokenizer.encode(caption)) for caption in captions]
        longest = self.max_caption_length
        for caption, ids in zip(captions, encoded, strict=True):
            if longest is not None and len(ids) > longest:
                raise ValueError(f"captions: the model reads {longest} tokens, got {len(ids)}: {shown(caption)}")
        device = next(self.parameters()).device
        lengths = torch.tensor([len(ids) for ids in encoded], dtype=torch.int64, device=device)
        padded = nn.utils.rnn.pad_sequence(encoded or [torch.zeros(0)], True, self.tokenizer.pad)
        return padded[: len(encoded)].to(device, torch.int64), lengths

    def encode(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> tuple[Any, Any]:
        """Encode images and captions.

        With `micro_batch`, that many images or captions are encoded at a time, and only the embeddings are kept: see
        `itm_fast.nn.micro_batches.encode`.
        """
        sides = {"encode_images": (features,), "encode_captions": (token_ids, lengths)}
        images, captions = micro_batches.encode(self, sides, micro_batch)
        return images, captions

    def first_image_weight(self) -> nn.Parameter:
        """Return the weight of the first layer for image features, whose gradient norm reveals vanishing gradients.

        This is the first parameter of `image_encoder`, or of the model if it has no such part or that has none.
        """
        return first_image_weight(self)

    @property
    def encoder_config(self) -> Any:
        """Return the settings with the encoders' sizes: those of the model, or of the model that it wraps."""
        return self.config

    @property
    def scores_within_one(self) -> bool:
        """Return whether all scores lie within [-1, 1], as cosines and their means do."""
        return True

    @property
    def scores_are_probabilities(self) -> bool:
        """Return whether all scores lie in (0, 1), as those of a sigmoid do."""
        return False

    @property
    def reads_tags(self) -> bool:
        """Return whether `encode_images` takes `itm_fast.data.TaggedImages`: regions with object tags."""
        return False

    @property
    def reads_boxes(self) -> bool:
        """Return whether regions have four values more than `feature_dim`: the edges of their boxes."""
        return False

    def prepare(self, dataset: CaptionDataset) -> None:
        """Let the batches of a data set contain what the model reads beside regions; ValueError if it has none."""
        if self.reads_tags:
            dataset.read_tags()
        if self.reads_boxes:
            dataset.read_boxes()

    @property
    def auxiliary_setting(self) -> str | None:
        """Return the setting by which the model has a loss of its own; None: it has none.

        In training mode, `forward` then keeps that loss for `take_auxiliary_loss`.
        """
        return None

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return the model's own loss of the last batch, with its graph, and forget it; None if there is none."""
        return None

    def auxiliary_factor(self, epoch: int) -> float:
        """Return the factor of the model's own loss in an epoch, counted from 0."""
        return 1.0

    def beside_bert(self) -> dict[str, nn.Module]:
        """Return modules whose weights the folder of a pretrained BERT may contain, by their names there."""
        return {}

    @property
    def pretrained_scale(self) -> tuple[float | None, float | None]:
        """Return scale and bias of the scores after pretraining, where a loss may start; None: there is none."""
        return None, None

    @property
    def max_caption_length(self) -> int | None:
        """Return the maximum number of tokens per caption; None if there is no limit, as with a GRU."""
        encoder = getattr(self, "text_encoder", None)
        return encoder.max_length if isinstance(encoder, BertTextEncoder) else None

    def forward(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> Tensor:
        """Score all images with all captions: (n_images, n_captions), images are rows. `micro_batch` as in `encode`.

        In training mode, image i and caption i are a pair, and the model may `observe` the scores.
        """
        images, captions = self.encode(features, token_ids, lengths, micro_batch)
        scores: Tensor = self.score(images, captions)
        if self.training:
            self.observe(images, captions, scores.detach())
        return scores

    def observe(
        self,
        images: Any,
        captions: Any,
        scores: Tensor,
        *,
        first: int = 0,
        total: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> None:
        """Learn from the scores of a training batch what is not learned by gradients. Most models learn nothing here.

        It is called after the scores are computed, so that what it changes counts from the next batch on.

        Args:
            images: embeddings of all images of the batch. captions: those of this process.
            scores: (n_images, n_captions), without a graph.
            first: index of the image of the first caption.
            total: adds a tensor up over the processes that share the batch. All of them call it.
        """

    def save(self, directory: str | os.PathLike[str], *, beside: Mapping[str, bytes] | None = None) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizer, if any.

        The folder is created if it is missing. If it contains another model, an interrupted call leaves that model, or
        a folder that `load` refuses. A full disk changes nothing. A model without a tokenizer removes that of an
        earlier one, unless `beside` has one.

        Args:
            directory: the folder.
            beside: contents of other files by name, which belong to the model and are replaced together with it.
        """
        contents = {**(beside or {}), **self.file_contents()}
        if self.tokenizer is not None:
            # As `Vocabulary.save` writes it.
            words = self.tokenizer.to_json().encode("utf-8", "backslashreplace")
            contents = {VOCABULARY: words, **contents}
        removed = {VOCABULARY} - contents.keys()
        atomic.write_together(directory, contents, marker=list(contents)[-1], removed=removed)

    def check_saved(self, directory: Path) -> None:
        """Raise ValueError naming the file if `load` cannot read what `save` wrote."""
        load(directory)

    def file_contents(self) -> dict[str, bytes]:
        """Return the files that `save` writes, by name. The last one marks a folder as a saved model."""
        content = {"format_version": FORMAT.newest, "model": self.name, "config": settings.to_dict(self.config)}
        config = (json.dumps(content, indent=2) + "\n").encode()
        return {WEIGHTS_FILE: weights_bytes(self.state_dict()), CONFIG_FILE: config}


def first_image_weight(model: nn.Module) -> nn.Parameter:
    """Return the first parameter of `image_encoder` if `model` has such a part with parameters, else of `model`."""
    encoder = getattr(model, "image_encoder", None)
    of_images = encoder.parameters() if isinstance(encoder, nn.Module) else ()
    return next(chain(of_images, model.parameters()))


def _overrides_scores(cls: type[MatchingModel]) -> bool:
    """Return whether `score`, `forward` or `observe` comes from a class that `attention_scores` does not know."""
    order = cls.__mro__
    place, owner = next((place, one) for place, one in enumerate(order) if "attention_scores" in vars(one))
    # A model knows its own base classes; a mixin knows none of the models that it is combined with.
    known = owner.__mro__ if issubclass(owner, MatchingModel) else order[place:]
    names = ("score", "forward", "observe")
    return any(next(one for one in order if name in vars(one)) not in known for name in names)


def _of_arrays(encode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(encode)
    def encode_images(self: MatchingModel, features: Any) -> Any:
        if not isinstance(features, np.ndarray):
            return encode(self, features)
        weight = next(self.parameters())
        # torch warns of arrays that cannot be written, such as memory-mapped files.
        values = np.require(features, requirements="W")
        with torch.no_grad():
            return encode(self, torch.from_numpy(values).to(weight.device, weight.dtype))

    return encode_images


def _of_text(encode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(encode)
    def encode_captions(self: MatchingModel, token_ids: Any, lengths: Tensor | None = None) -> Any:
        if lengths is not None:
            return encode(self, token_ids, lengths)
        with torch.no_grad():
            return encode(self, *self.tokenize(token_ids))

    return encode_captions


def _of_inference(score: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(score)
    def inference_score(self: MatchingModel, images: Any, captions: Any, *rest: Any, **more: Any) -> Any:
        if self.training or _may_have_graph(images) or _may_have_graph(captions):
            return score(self, images, captions, *rest, **more)
        with torch.no_grad():
            return score(self, images, captions, *rest, **more)

    return inference_score


def _may_have_graph(embeddings: Any) -> bool:
    values = embeddings.values if isinstance(embeddings, Fragments) else embeddings
    return not isinstance(values, Tensor) or values.requires_grad


_MODELS: dict[str, type[MatchingModel]] = {}
_plugins = Plugins("itm_fast.models")
Model = TypeVar("Model", bound=type[MatchingModel])


def register(model: Model) -> Model:
    """Register a subclass of `MatchingModel` by its `name`, for training, `create` and `load` (a class decorator).

    Raises:
        ValueError: another model has this name.
    """
    known = _MODELS.get(model.name)
    if known is not None and (known.__module__, known.__qualname__) != (model.__module__, model.__qualname__):
        raise ValueError(f"model {model.name!r} is registered twice: by {known.__module__} and {model.__module__}")
    _MODELS[model.name] = model
    return model


def names(*, plugins: bool = True) -> list[str]:
    """Return the names that `create` accepts, those of installed plugins included unless `plugins` is False."""
    _load_built_in()
    return sorted({*_MODELS, *(_plugins.names() if plugins else ())})


def config_class(name: str) -> type:
    """Return the configuration class of a model; ValueError for an unknown name."""
    return model_class(name).Config


def model_class(name: str) -> type[MatchingModel]:
    """Return the class of a model; ValueError for an unknown name."""
    _load_built_in()
    if name not in _MODELS:
        _plugins.load(name)
    if name not in _MODELS:
        raise ValueError(settings.unknown_name("model", name, names()))
    return _MODELS[name]


@functools.cache
def _load_built_in() -> None:
    """Import every module of this folder, so that each registers its models."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def create(name: str, /, **config: Any) -> MatchingModel:
    """Create a model by name, with weights initialised from torch's random state.

    Raises:
        ValueError: the model or a setting is unknown, a required one is missing, or a value is out of bounds.
    """
    cls = config_class(name)
    return _MODELS[name](settings.build(cls, config, f"{name} setting"))


def load(directory: str | os.PathLike[str], device: torch.device | str = "cpu") -> MatchingModel:
    """Read what `model.save` or a training run wrote: the model in evaluation mode, with its tokenizer if there is one.

    Raises:
        ValueError: a file is missing or damaged, the format is newer than this package, the weights or the vocabulary
            do not fit the configuration, or a weight is not finite; the message names the file.
    """
    if Path(directory).is_file():
        raise ValueError(f"{directory}: expected the folder of a saved model, found a file")
    config_path, weights_path = Path(directory) / CONFIG_FILE, Path(directory) / WEIGHTS_FILE
    name, config = read_config(config_path)
    shapes = read_shapes(weights_path)
    try:
        expected = planned_shapes(name, config)
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from None
    check_shapes(expected, shapes, str(weights_path))
    weights = read_weights(weights_path)
    model = create(name, **config)
    load_weights(model, weights, str(weights_path))
    vocabulary = Path(directory) / VOCABULARY
    if regular.is_file(vocabulary):
        model.tokenizer = Vocabulary.from_file(vocabulary)
        known = getattr(model.encoder_config, "vocab_size", len(model.tokenizer))
        if len(model.tokenizer) != known:
            raise ValueError(f"{vocabulary}: {len(model.tokenizer)} words, but the model in {directory} knows {known}")
    return model.to(device).eval()


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a model by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def planned_shapes(name: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights without allocating them.

    Memory is allocated only after the file is known to have these shapes. Raises ValueError as `create` does.
    """
    try:
        with torch.device("meta"):
            return shapes_of(create(name, **config))
    except (TypeError, RuntimeError) as error:
        raise ValueError(str(error).splitlines()[0]) from None


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise ValueError naming `source` and the first weight that is unknown, missing or of another shape."""
    for name in found:
        if name not in expected:
            raise ValueError(f"{source}: the weight {shortened(name)} is unknown to the model")
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{source}: the weight {name} is missing")
        if found[name] != shape:
            raise ValueError(f"{source}: {name}: expected shape {shape}, got {shown(found[name])}")


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copy `weights` into `model` after checking names, shapes and values. Errors name `source`."""
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"{source}: expected names of weights as strings, got {shown(name)}")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{source}: {shortened(name)}: expected a tensor, got {type(tensor).__name__}")
    check_shapes(shapes_of(model), {name: tuple(tensor.shape) for name, tensor in weights.items()}, source)
    for name, own in model.state_dict().items():
        tensor = weights[name]
        fits = tensor.is_floating_point() if own.is_floating_point() else tensor.dtype == own.dtype
        if not fits:
            kind = "floating point" if own.is_floating_point() else str(own.dtype)
            raise ValueError(f"{source}: {name}: expected {kind} values, got {tensor.dtype}")
        check_finite(tensor, f"{source}: {name}", own)
    model.load_state_dict(weights)


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and settings of a saved model, in any supported version of the format."""
    try:
        content = read_json(path, MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise missing(path) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object with model and config")
    content = FORMAT.upgrade(content, path)
    name, config = content.get("model"), content.get("config")
    if not isinstance(name, str) or not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object with model and config")
    return name, config
