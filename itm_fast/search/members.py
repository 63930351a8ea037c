"""The models of an index: what they encode, how they score, and a fingerprint that identifies them.

Inside: `Members`, `members_of`, `fingerprint`, `Encodings`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from itm_fast import config as settings
from itm_fast import models
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.functional import maxsim_scores
from itm_fast.models import MatchingModel
from itm_fast.search.manifest import Manifest

__all__ = ["Encodings", "Members", "Models", "fingerprint", "members_of"]

# The embeddings of some items, one entry per model.
Encodings = list[Any]
Models = MatchingModel | str | os.PathLike[str] | Sequence[MatchingModel | str | os.PathLike[str]]


def fingerprint(model: MatchingModel) -> str:
    """Return the SHA-256 of a model: its name, settings, weights and vocabulary.

    Settings with their default value are left out, so that a new setting of a later version does not change it.
    """
    fields = settings.fields_of(type(model.config))
    chosen = {name: value for name, value in settings.to_dict(model.config).items() if value != fields[name].default}
    digest = hashlib.sha256(json.dumps([model.name, chosen], sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    if model.tokenizer is not None:
        digest.update(model.tokenizer.to_json().encode())
    return digest.hexdigest()


class Members:
    """One model, or an ensemble by mean score. Models are put in evaluation mode; nothing builds an autograd graph.

    Args:
        given: models, or run directories that `itm_fast.models.load` reads.
        device: the device of models that are loaded.

    Attributes:
        models: the models.
        checkpoints: their run directories; empty if models were given.
        fingerprints: the fingerprint of each.

    Raises:
        TypeError: something else was given.
        ValueError: there is no model, a folder holds none, or one was given twice.
    """

    def __init__(self, given: Models, device: torch.device | str = "cpu") -> None:
        parts = [given] if isinstance(given, MatchingModel | str | os.PathLike) else list(given)
        if not parts:
            raise ValueError("model: expected at least one model")
        self.models: list[MatchingModel] = []
        for part in parts:
            if isinstance(part, str | os.PathLike):
                self.models.append(models.load(part, device))
            elif isinstance(part, MatchingModel):
                self.models.append(part.eval())
            else:
                raise TypeError(f"model: expected a MatchingModel or a run directory, got {shown(part)}")
        loaded = all(isinstance(part, str | os.PathLike) for part in parts)
        self.checkpoints = tuple(str(Path(str(part)).resolve()) for part in parts) if loaded else ()
        self.fingerprints = tuple(fingerprint(model) for model in self.models)
        if len(set(self.fingerprints)) < len(self.fingerprints):
            raise ValueError("model: the same model was given twice; an ensemble needs different models")

    @property
    def main(self) -> MatchingModel:
        """Return the first model."""
        return self.models[0]

    @property
    def device(self) -> torch.device:
        """Return where the first model runs."""
        return _device(self.main)

    @torch.no_grad()
    def encode_images(self, features: Tensor | Fragments) -> Encodings:
        """Encode features (n, k, f), or Fragments, by each model; the results are on the CPU in float32."""
        return [
            _on_cpu(model, model.encode_images(features.to(_device(model), torch.float32))) for model in self.models
        ]

    @torch.no_grad()
    def encode_captions(self, texts: Sequence[str]) -> Encodings:
        """Encode texts by each model; the results are on the CPU in float32."""
        return [_on_cpu(model, model.encode_captions(*model.tokenize(texts))) for model in self.models]

    def have_sets(self) -> bool:
        """Return whether a model encodes captions as sets of rows, instead of one vector each."""
        return any(isinstance(one, Fragments) for one in self.encode_captions(["a"]))

    @torch.no_grad()
    def scores(self, queries: Encodings, query_side: str, items: Encodings, side: str) -> Tensor:
        """Score queries with items: (n_queries, n_items) float32, the mean over the models.

        A model has no score for two images or for two captions. Such pairs are scored by the cosines of their rows: the
        mean over all rows of both of the greatest cosine with a row of the other, or the cosine of two vectors.
        """
        members = zip(self.models, queries, items, strict=True)
        scores = [
            _likeness(own, others) if query_side == side else self.scores_of(model, query_side, own, others)
            for model, own, others in members
        ]
        return scores[0] if len(scores) == 1 else torch.stack(scores).mean(0)

    @staticmethod
    @torch.no_grad()
    def scores_of(model: MatchingModel, query_side: str, queries: Any, items: Any) -> Tensor:
        """Score queries with items of the other side by one model: (n_queries, n_items) float32 on the CPU."""
        where = _device(model)
        images, captions = (queries, items) if query_side == "images" else (items, queries)
        scores = model.score(images.to(where), captions.to(where)).to("cpu", torch.float32)
        return scores if query_side == "images" else scores.t()


def members_of(path: Path, manifest: Manifest, given: Models | Members | None, device: torch.device | str) -> Members:
    """Return the models of an index: those `given`, or those of the run directories that it names.

    Raises:
        ValueError: the index names none, one cannot be read, or they are not the models of the index.
    """
    if given is None and not manifest.checkpoints:
        raise ValueError(f"{path}: the index names no run directory; name the model that it was built with")
    try:
        members = given if isinstance(given, Members) else Members(given or manifest.checkpoints, device)
    except ValueError as error:
        if given is not None:
            raise
        advice = (
            "if the run directory was moved, name it with --checkpoint RUN, or record it with itm-fast index relocate"
        )
        raise ValueError(f"{error}; {advice}") from None
    if members.fingerprints != manifest.models:
        what = ", ".join(members.checkpoints) or "this model"
        raise ValueError(f"{path}: the index was built with another model than {what}; build it again to use this one")
    return members


def _device(model: MatchingModel) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _on_cpu(model: MatchingModel, embeddings: Any) -> Any:
    if not isinstance(embeddings, Tensor | Fragments):
        raise ValueError(
            f"model: an index keeps one tensor or Fragments per side, but {model.name} encodes as "
            f"{type(embeddings).__name__}"
        )
    return embeddings.to("cpu", torch.float32)


def _likeness(left: Any, right: Any) -> Tensor:
    if isinstance(left, Tensor):
        return torch.nn.functional.normalize(left, dim=1) @ torch.nn.functional.normalize(right, dim=1).t()
    # The sums over the rows of both sides, each divided by the number of rows.
    forward = maxsim_scores(left, right, similarity="cosine", reduction="mean")
    backward = maxsim_scores(left, right, similarity="cosine", reduction="mean", direction="contexts")
    return (forward + backward) / 2
