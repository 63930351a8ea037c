"""The scenario of ADDR: one image-text discriminator per training image, and a model that learns to deceive them.

Source: Ren et al., "Beyond the Deep Metric Learning: Enhance the Cross-Modal Matching with Adversarial Discriminative
Domain Regularization", Algorithm 1 and Eqs 10 and 11. Where the paper leaves a choice open, this scenario uses the
following readings. `itm_fast.functional.domain_regularization` describes those of Eqs 2 to 9, and docs/methods/addr.md
has all of them:

- Fragments are the l2-normalised vectors that enter the similarity. For VSRN these are the regions before its GRU and
  the states of the captions' GRU.
- A discriminator belongs to an image, starts at zero and serves all captions of the image. All pairs of a batch that
  share an image contribute to one update of a lazy Adam, which counts steps per row. Batches remain random pairs. With
  `discriminator_captions: image`, a step of the discriminators takes each image of the batch once, beside the words of
  all its captions ("one image sample and 5 of its paired sentences", section V).
- q and r are the hardest negatives of the batch, chosen by scores without gradient; pairs of the same image are
  excluded. A pair without a negative has no regularization term.
- Eq 10 is a mean over the pairs. Its features come without gradient from the model in evaluation mode, so that batch
  normalization does not change.
- Eq 11 holds W and b fixed. Encoders learn from both terms, the similarity only from the ranking loss. Both terms are
  sums or means over the batch. The last sentence of section IV-B adds the regularization to this phase; as in Eq 11, it
  is left out unless `model_regularization_weight` is given.
- Algorithm 1: an epoch is one pass over the data for the discriminators and one for the model. The learning rate of
  each follows the schedule according to its own step count.

Inside: `AddrScenario`, `check_model`, `snapshot_path`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.data.placement import Placement
from itm_fast.files import atomic
from itm_fast.files.run_files import DISCRIMINATORS
from itm_fast.fragments import Fragments
from itm_fast.models import FDF, FragmentModel, MatchingModel
from itm_fast.training.addr.discriminators import Discriminators, GatheredRows
from itm_fast.training.addr.images import ImageSamples
from itm_fast.training.branch import Branch, finite
from itm_fast.training.checkpoint import STATE_FILE
from itm_fast.training.config import TrainConfig
from itm_fast.training.phases import Phases
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult
from itm_fast.training.schedule import learning_rate
from itm_fast.training.state_check import check_equal, check_like

__all__ = ["AddrScenario", "check_model", "snapshot_path"]


def check_model(model: MatchingModel) -> FragmentModel:
    """Return `model` as a `FragmentModel`. Raises ValueError if it has no fragments."""
    if isinstance(model, FragmentModel) and model.yields_fragments:
        return model
    name = model.config.host if isinstance(model, FDF) else model.name
    raise ValueError(f"scenario: addr needs regions and words, but the model {name} has none")


class AddrScenario(Scenario):
    """Alternate steps of discriminators that tell regions from words and steps of a model that makes them alike.

    A discriminator step changes only the discriminators of the images in the batch, with the loss `mean_p (R_p(f_p) +
    gamma L_reg)`; the model scores in evaluation mode, without gradients. A model step changes only the model's
    weights, with the loss `sum_p (L_rank - beta R_p(f_p) + delta L_reg)`, or the mean with `mean_loss`. The layers that
    produce the fragments learn from all terms, the similarity only from the first. delta is 0 by default.

    Args:
        target: the branch that learns; its model is a `FragmentModel`.
        config: the settings of the run.
        phases: says which steps belong to the discriminators and which to the model.
        n_images: number of images in the training split.
        room: memory in bytes that the discriminators may take; None: no limit. Larger ones are kept on disk.
        caption_image: (n_captions,) int64, the image of each caption of the training split, for
            `discriminator_captions: image`.
    """

    def __init__(
        self,
        target: Branch,
        config: TrainConfig,
        phases: Phases,
        n_images: int,
        room: int | None = None,
        caption_image: Tensor | None = None,
    ) -> None:
        super().__init__([target], 0.0)
        self.config, self.phases = config, phases
        self.model = check_model(target.model)
        # "united": all images share one discriminator.
        self.n_discriminators = 1 if config.addr == "united" else n_images
        self.placement = self._placement(room)
        regularized = config.addr in (None, "full")
        self.gamma = config.regularization_weight if regularized else 0.0
        self.delta = config.model_regularization_weight if regularized else 0.0
        rate = config.lr if config.discriminator_lr is None else config.discriminator_lr
        self._rates = attrs.evolve(config, lr=rate)
        self.images: ImageSamples | None = None
        if config.discriminator_captions == "image":
            if caption_image is None:
                raise ValueError("discriminator_captions: image needs the training set, which is not given")
            self.images = ImageSamples(caption_image)
        self._steps = 0
        self._loss = 0.0
        self._saved: int | None = None

    def _placement(self, room: int | None) -> Placement:
        """Decide where the discriminators are kept, and give the reason."""
        if self.config.discriminators_on_disk:
            return Placement("disk", "as asked for")
        with torch.device("meta"):
            needed = Discriminators(
                self.n_discriminators, self.model.fragment_dim, precision=self.config.discriminator_precision
            ).nbytes
        what = f"{needed / 2**30:.2f} GiB of discriminators"
        if room is None:
            return Placement("host", what)
        what += f", {max(room, 0) / 2**30:.2f} GiB to spare in the memory of the host"
        return Placement("host" if needed <= room else "disk", what)

    @functools.cached_property
    def discriminators(self) -> Discriminators:
        """The discriminators, created on first use so that a refused run takes no disk space."""
        folder = snapshot_path(self.config.out, 0).parent if self.placement.where == "disk" else None
        precision, seed = self.config.discriminator_precision, self.config.seed
        return Discriminators(
            self.n_discriminators,
            self.model.fragment_dim,
            precision=precision,
            folder=folder,
            root=self.config.out,
            seed=seed,
        )

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step of the current phase; messages name the step by `number`.

        Raises:
            ValueError: a loss or a gradient norm is not finite. Nothing is changed in that case.
        """
        if self.phases.trains_discriminators(self._steps):
            result = self._discriminator_step(batch, number)
        else:
            result = self._model_step(batch, number)
        self._steps += 1
        return result

    def _discriminator_step(self, batch: BatchFunctions, number: int) -> StepResult:
        with torch.no_grad():
            images, scores, regions, words = self._samples(batch)
            negatives = (None, None) if scores is None or not self.gamma else _negatives(images, scores)
        rows = self._gather(images)
        weights, biases = rows.weights.requires_grad_(), rows.biases.requires_grad_()
        risks, regularization = self._risks(regions, words, weights[rows.places], biases[rows.places], *negatives)
        loss = (risks + self.gamma * regularization).mean()
        value = finite("loss of the discriminators", loss, number)
        weight_gradients, bias_gradients = torch.autograd.grad(loss, (weights, biases))
        rate = learning_rate(self._rates, self.discriminators.updates, self.phases.batches)
        self.discriminators.update(rows, weight_gradients, bias_gradients, rate)
        self._loss = value
        numbers = {"discriminator_loss": value, "domain_risk": float(risks.detach().mean()), "discriminator_lr": rate}
        return StepResult(None, None, numbers)

    def _samples(self, batch: BatchFunctions) -> tuple[Tensor, Tensor | None, Fragments, Fragments]:
        """Return images, scores, regions and words that the discriminators learn from."""
        model, scored = self.model.eval(), bool(self.gamma)
        if self.images is not None:
            return self.images(batch, model, scored=scored)
        return batch.images, *batch.fragments(model, scored=scored)

    def _model_step(self, batch: BatchFunctions, number: int) -> StepResult:
        scores, regions, words = batch.fragments(self.model.train(), scored=True)
        assert scores is not None
        rows = self._gather(batch.images)
        negatives = _negatives(batch.images, scores.detach()) if self.delta else (None, None)
        risks, regularization = self._risks(
            regions, words, rows.weights[rows.places], rows.biases[rows.places], *negatives
        )
        own = batch.loss(scores)
        domain = self.delta * regularization - self.config.adversarial_weight * risks
        total = batch.total(domain) / (len(batch.images) if self.config.mean_loss else 1)
        numbers = self.target.backward(own + total, number)
        numbers |= {"domain_risk": float(risks.detach().mean()), "discriminator_loss": self._loss}
        numbers["lr"] = self.target.update()
        return StepResult(scores.detach(), float(own.detach()), numbers)

    def _risks(
        self,
        regions: Fragments,
        words: Fragments,
        weights: Tensor,
        biases: Tensor,
        negative_captions: Tensor | None = None,
        negative_images: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return R_p(f_p) and the regularization of each pair."""
        # Under autocast the two encoders may return different dtypes.
        dtype = torch.promote_types(regions.dtype, words.dtype)
        return F_itm.domain_regularization(
            regions.to(dtype),
            words.to(dtype),
            weights,
            biases,
            negative_captions,
            negative_images,
            margin=self.config.domain_margin,
            aggregation=self.config.risk_aggregation,
        )

    def _gather(self, images: Tensor) -> GatheredRows:
        return self.discriminators.gather(torch.zeros_like(images) if self.n_discriminators == 1 else images)

    @property
    def has_state(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """Like `Scenario.state_dict`; `save_files` writes the discriminators to a separate file."""
        scenario = {"updates": self.phases.discriminator_steps(self._steps), "discriminator_loss": self._loss}
        return {**self.target.state_dict(), "scenario": scenario}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Like `Scenario.load_state_dict`; `load_files` reads the discriminators."""
        updates = self.phases.discriminator_steps(steps)
        self.target.load_state_dict(state, steps - updates)
        expected = {"updates": updates, "discriminator_loss": 0.0}
        check_like(state["scenario"], expected, "scenario")
        check_equal(state["scenario"], expected, "scenario", free=("discriminator_loss",))
        self._steps, self._loss = steps, state["scenario"]["discriminator_loss"]

    def save_files(self, run: str | os.PathLike[str], data: str) -> None:
        """Write the discriminators beside the state that is about to be saved, in a file named after their update
        count.

        The previous state and its discriminators remain until the new state exists, so that one of the two is always
        complete. Nothing is written if the discriminators have not changed since the last call.
        """
        updates = self.discriminators.updates
        if updates != self._saved:
            self.discriminators.save(snapshot_path(run, updates), data, run)
            self._saved = updates

    def load_files(self, run: str | os.PathLike[str], data: str) -> None:
        """Read the discriminators that belong to the state passed to `load_state_dict`; ValueErrors name their file."""
        updates = self.phases.discriminator_steps(self._steps)
        self.discriminators.load(snapshot_path(run, updates), data, updates)
        self._saved = updates

    def forget_files(self, run: str | os.PathLike[str]) -> None:
        """Remove the discriminators of earlier states."""
        kept = snapshot_path(run, self.discriminators.updates)
        atomic.remove_matching(kept.with_name(DISCRIMINATORS), run, kept=kept.name)


def _negatives(images: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hardest caption and the hardest image of other images for each pair; -1 without a negative."""
    rows, columns = F_itm.hardest_negatives(scores, images[:, None] == images)
    return rows[1], columns[1]


def snapshot_path(run: str | os.PathLike[str], updates: int) -> Path:
    """Return the path of a run's discriminators after `updates` updates."""
    return (Path(run) / STATE_FILE).with_name(DISCRIMINATORS.replace("*", str(updates)))
