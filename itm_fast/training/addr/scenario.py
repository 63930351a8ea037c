"""The scenario of ADDR: discriminators of image and text, one per training image, and a model that deceives them.

Source: Ren et al., "Beyond the Deep Metric Learning: Enhance the Cross-Modal Matching with Adversarial Discriminative
Domain Regularization", Algorithm 1 and Eqs 10 and 11. Readings of what the paper leaves open, beside those of Eq 2 to 9
in `itm_fast.functional.domain_regularization`; docs/methods/addr.md has all of them:

- Fragments are the vectors that enter the similarity, l2-normalised; of VSRN the regions before its GRU, and the states
  of the captions' GRU.
- A discriminator belongs to an image, starts at zero and serves all captions of it; what several pairs of a batch
  contribute to it is one update of a lazy Adam, which counts steps for every row. Batches stay random pairs.
- q and r are the hardest negatives of the batch, by scores without gradient; pairs of the same image are none. A pair
  without one has no regularisation.
- Eq 10 is a mean over the pairs, on features without gradient of a model in evaluation mode, whose batch normalisation
  so stays as it is.
- Eq 11 holds W and b fixed: encoders learn from both terms, the similarity from the ranking loss alone. Both terms are
  sums over the batch, or means. The regularisation, of which the last sentence of section IV-B speaks in this phase, is
  left out as in Eq 11 unless `model_regularization_weight` is given.
- Algorithm 1: one pass over the data for the discriminators and one for the model are an epoch; the rate of each
  follows the schedule by its own steps.

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
from itm_fast.training.branch import Branch, finite
from itm_fast.training.checkpoint import STATE_FILE
from itm_fast.training.config import TrainConfig
from itm_fast.training.phases import Phases
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult
from itm_fast.training.schedule import learning_rate
from itm_fast.training.state_check import check_equal, check_like

__all__ = ["AddrScenario", "check_model", "snapshot_path"]


def check_model(model: MatchingModel) -> FragmentModel:
    """The model as one that yields fragments; ValueError where it has none."""
    if isinstance(model, FragmentModel) and model.yields_fragments:
        return model
    name = model.config.host if isinstance(model, FDF) else model.name
    raise ValueError(f"scenario: addr looks at regions and words, but the model {name} yields none")


class AddrScenario(Scenario):
    """Steps of the discriminators, which tell regions from words, and steps of the model, which makes them alike.

    A step of the discriminators changes those of the images in the batch alone, by `mean_p (R_p(f_p) + gamma L_reg)`;
    the model scores in evaluation mode, without gradients. A step of the model changes its weights alone, by
    `sum_p (L_rank - beta R_p(f_p) + delta L_reg)`, or the mean with `mean_loss`: what yields the fragments learns from
    all terms, the similarity from the first. delta is 0 unless asked for.

    Args:
        target: the branch that learns, of a `FragmentModel`.
        config: the settings of the run.
        phases: which step is whose.
        n_images: images of the training split.
        room: bytes of memory that the discriminators may take; None: any number. Those that need more lie on the disk.
    """

    def __init__(
        self, target: Branch, config: TrainConfig, phases: Phases, n_images: int, room: int | None = None
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
        self._steps = 0
        self._loss = 0.0
        self._saved: int | None = None

    def _placement(self, room: int | None) -> Placement:
        """Where the discriminators lie, and why."""
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
        """Made on first use, so that a run that is refused has taken no room on a disk."""
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
        """One step of the phase that is due; `number` is what messages call it.

        Raises:
            ValueError: a loss or the norm of a gradient is not finite; nothing is changed then.
        """
        if self.phases.trains_discriminators(self._steps):
            result = self._discriminator_step(batch, number)
        else:
            result = self._model_step(batch, number)
        self._steps += 1
        return result

    def _discriminator_step(self, batch: BatchFunctions, number: int) -> StepResult:
        with torch.no_grad():
            scores, regions, words = batch.fragments(self.model.eval(), scored=bool(self.gamma))
            negatives = (None, None) if scores is None or not self.gamma else self._negatives(batch, scores)
        rows = self._gather(batch)
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

    def _model_step(self, batch: BatchFunctions, number: int) -> StepResult:
        scores, regions, words = batch.fragments(self.model.train(), scored=True)
        assert scores is not None
        rows = self._gather(batch)
        negatives = self._negatives(batch, scores.detach()) if self.delta else (None, None)
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
        """R_p(f_p) and the regularisation of each pair."""
        # Autocast may leave the encoders in different dtypes.
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

    def _negatives(self, batch: BatchFunctions, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of each pair the hardest caption and the hardest image of other images, -1 where there are none."""
        same_image = batch.images[:, None] == batch.images
        rows, columns = F_itm.hardest_negatives(scores, same_image)
        return rows[1], columns[1]

    def _gather(self, batch: BatchFunctions) -> GatheredRows:
        images = batch.images
        return self.discriminators.gather(torch.zeros_like(images) if self.n_discriminators == 1 else images)

    @property
    def has_state(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """As `Scenario.state_dict`; the discriminators are in a file of their own, `save_files`."""
        scenario = {"updates": self.phases.discriminator_steps(self._steps), "discriminator_loss": self._loss}
        return {**self.target.state_dict(), "scenario": scenario}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """As `Scenario.load_state_dict`; the discriminators come by `load_files`."""
        updates = self.phases.discriminator_steps(steps)
        self.target.load_state_dict(state, steps - updates)
        expected = {"updates": updates, "discriminator_loss": 0.0}
        check_like(state["scenario"], expected, "scenario")
        check_equal(state["scenario"], expected, "scenario", free=("discriminator_loss",))
        self._steps, self._loss = steps, state["scenario"]["discriminator_loss"]

    def save_files(self, run: str | os.PathLike[str], data: str) -> None:
        """Writes the discriminators beside the state that is about to be saved, under a name that is theirs alone.

        The state of before and its discriminators stay as they are, and so one of both is always whole. Between two
        changes of the discriminators there is nothing to write.
        """
        updates = self.discriminators.updates
        if updates != self._saved:
            self.discriminators.save(snapshot_path(run, updates), data, run)
            self._saved = updates

    def load_files(self, run: str | os.PathLike[str], data: str) -> None:
        """Takes the discriminators that belong to the state of `load_state_dict`; ValueError naming their file."""
        updates = self.phases.discriminator_steps(self._steps)
        self.discriminators.load(snapshot_path(run, updates), data, updates)
        self._saved = updates

    def forget_files(self, run: str | os.PathLike[str]) -> None:
        """Removes the discriminators of earlier states."""
        kept = snapshot_path(run, self.discriminators.updates)
        atomic.remove_matching(kept.with_name(DISCRIMINATORS), run, kept=kept.name)


def snapshot_path(run: str | os.PathLike[str], updates: int) -> Path:
    """The file of the discriminators of a run after so many steps of theirs."""
    return (Path(run) / STATE_FILE).with_name(DISCRIMINATORS.replace("*", str(updates)))
