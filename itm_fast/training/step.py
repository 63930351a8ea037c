"""One optimiser step on a batch: builds the losses of the batch and runs the step of the scenario.

Inside: `Stepper`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from itm_fast.data import Batch, BatchAugmentation, Vocabulary
from itm_fast.distributed import World
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.training.config import TrainConfig
from itm_fast.training.diagnostics import (
    embedding_diagnostics,
    image_gradient_norm,
    mining_diagnostics,
    watched_embeddings,
)
from itm_fast.training.gradient_monitor import GradientMonitor
from itm_fast.training.loss_rules import RIVALS, check_auxiliary, check_copies, escapes, mining_of, warms_up_itself
from itm_fast.training.objective import make_boosting_loss, make_losses, make_realignment_losses
from itm_fast.training.plateau import PlateauMonitor
from itm_fast.training.reading import picture_augmentation
from itm_fast.training.replicas import Replicas, check_shared
from itm_fast.training.scenarios import BatchFunctions, StepResult, make_scenario
from itm_fast.training.shares import images_of
from itm_fast.training.state_check import MayLack, check_like

__all__ = ["Stepper"]


class Stepper:
    """Update the weights of `model` batch by batch as `config` says. The model is already on its device.

    `per_epoch` is the number of model steps per epoch and `anchor` the frozen model of the scenario oas. `image_rows`
    returns the regions (n, k, f) of images by their rows in the training data, and `n_images` is the number of images.
    `world` describes the processes that share each batch. `room` is the host memory in bytes that the discriminators of
    the scenario addr may take (None: no limit). `loss` replaces the one that `config` names, in all epochs. `data` and
    `validation_data` are the data sets, which some scenarios read.

    Raises:
        ValueError: the settings, the model and the number of processes cannot be combined.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: MatchingModel,
        vocabulary: Vocabulary | None,
        device: torch.device,
        per_epoch: int,
        anchor: MatchingModel | None = None,
        image_rows: Callable[[Tensor], Tensor | Fragments] | None = None,
        n_images: int = 1,
        world: World | None = None,
        room: int | None = None,
        loss: nn.Module | None = None,
        data: Any = None,
        validation_data: Any = None,
    ) -> None:
        self.config = config = config.resolved()
        self.device, self.world, self.data = device, world or World(), data
        self._per_epoch, self._epoch = per_epoch, 0
        if self.world.size > 1 and config.scenario in RIVALS:
            raise ValueError(f"scenario: {config.scenario} trains in one process, got {self.world.size}")
        if self.world.size > 1 and config.discriminator_captions == "image":
            raise ValueError(f"discriminator_captions: image trains in one process, got {self.world.size}")
        if model.auxiliary_setting is not None:
            check_auxiliary(config, model.auxiliary_setting, self.world.size)
        self._auxiliary: float | None = None  # Of the target in the last step.
        self.mining = mining_of(config)
        self.losses = nn.ModuleDict(make_losses(config, model) if loss is None else {self.mining: loss}).to(device)
        self._unchecked = self.world.size > 1 and loss is not None
        self._copies: int = getattr(self.losses[self.mining], "copies", 1)
        if self._copies > 1:
            check_copies(config, self.world.size)
        self._own_loss = loss is not None
        self.boosting_loss = make_boosting_loss(config)
        self.realignment_losses = make_realignment_losses(config)
        of_loss = list(self.losses.parameters())
        self.scenario = make_scenario(
            config, model, per_epoch, anchor, image_rows, n_images, room, of_loss, data, validation_data
        )
        if "all" in self.losses and self.mining != "all" and not warms_up_itself(config.loss):
            self.scenario.branches[0].start_later(of_loss, (config.warmup_epochs or 0) * per_epoch)
        learning = [branch.model for branch in self.scenario.branches]
        check_shared(self.scenario.models, self.world)
        self.replicas = Replicas(self.world, learning, config.micro_batch)
        self.plateau = PlateauMonitor(config.margin)
        self.gradients = GradientMonitor()
        self.cautions: list[str] = []  # The warnings of the last step, for the log.
        self.augmentation = BatchAugmentation(
            vocabulary, words=config.text_augmentation, regions=config.region_augmentation
        )

    def __call__(self, batch: Batch, mining: str, number: int, *, diagnose: bool = False) -> dict[str, float]:
        """Run step `number` with the negatives `mining`; return the loss, the gradient norm before clipping and the
        learning rate.

        All are those of the target. With anchors, the boosting loss, which is part of the loss, is returned too. With
        `diagnose`, so are the `mining_diagnostics` of the scores, the `embedding_diagnostics`, and
        `image_gradient_norm` before clipping. A step that does not change the target returns other numbers.

        Raises:
            ValueError: a loss or norm is not finite. No weight is changed in that case.
        """
        self._epoch = max(number - 1, 0) // self._per_epoch
        batch = batch.repeated(self._copies) if self._copies > 1 else batch
        # Augmentation draws from torch's generator, whose state is saved, so a resumed run draws the same.
        batch = self.augmentation(batch, self.device, non_blocking=True)
        images, positives = images_of(batch), None
        if self.config.exclude_same_image:
            positives = images[:, None] == images[None, :]
        elif self._copies > 1:
            positives = batch.caption_index[:, None] == batch.caption_index[None, :]
        target = self.scenario.target
        after = target.after_backward if self.world.size > 1 else None
        with (
            image_gradient_norm(target.model, enabled=diagnose, after_backward=after) as diagnostics,
            watched_embeddings(target.model, enabled=diagnose) as embeddings,
        ):
            result = self.scenario.step(self._functions(batch, mining, positives), number)
        if diagnose and result.scores is not None:
            diagnostics |= mining_diagnostics(result.scores, positives, mining, self.config.epsilon)
            if embeddings:
                gather = partial(self.replicas.whole_rows, batch=batch)
                diagnostics |= embedding_diagnostics(result.scores, positives, embeddings[0], embeddings[1], gather)
        found: list[str | None] = []
        if result.scores is not None:
            found.append(self._watch(result, mining, diagnostics.get("score_spread")))
        numbers = result.numbers
        if "grad_norm" in numbers:
            found.append(self.gradients.update(numbers["grad_norm"], numbers["loss"]))
        self.cautions = [caution for caution in found if caution is not None]
        beside = {} if self._auxiliary is None else {"auxiliary_loss": self._auxiliary}
        return {**numbers, **beside, **self._of_loss(), **diagnostics}

    def _watch(self, result: StepResult, mining: str, spread: float | None) -> str | None:
        """Return the warning of collapsed scores after a step of the target; `spread` is that of logged steps."""
        scores, loss = result.scores, None
        assert scores is not None
        # Later spreads are compared with that of the untrained model.
        if self.plateau.widest == 0.0 and spread is None and scores.numel() > 1:
            spread = float(scores.float().std())
        if self._own_loss:
            return self.plateau.update(spread, "Lower --lr")
        if result.own_loss is not None and mining == "hardest" and self.config.loss == "triplet":
            factor = (2 if self.config.halve_loss else 1) * (len(scores) if self.config.mean_loss else 1)
            loss = factor * (result.own_loss - (self._auxiliary or 0.0))
        return self.plateau.update(spread, escapes(self.config, mining), loss, len(scores))

    def _of_loss(self) -> dict[str, float]:
        """Return the scalar parameters of the loss, for the log."""
        learned = self.losses[self.mining].named_parameters()
        return {f"loss_{name.rpartition('.')[2]}": float(one.detach()) for name, one in learned if one.numel() == 1}

    def _functions(self, batch: Batch, mining: str, positives: Tensor | None) -> BatchFunctions:
        def scores(model: MatchingModel) -> Tensor:
            with self.autocast():
                return self.replicas.scores(model, batch)

        def scores_and_loss(model: MatchingModel) -> tuple[Tensor, Tensor]:
            loss = self.losses[mining]
            with self.autocast():
                scores, own = self.replicas.scores_and_loss(model, batch, loss, positives)
            if own is None:
                own = loss(scores, positives=positives)
                self._check_own(own, scores, model)
            auxiliary = model.take_auxiliary_loss()
            if auxiliary is not None:
                auxiliary = model.auxiliary_factor(self._epoch) * auxiliary
            # The target comes last.
            self._auxiliary = None if auxiliary is None else float(auxiliary.detach())
            return scores, own if auxiliary is None else own + auxiliary

        def fragments(model: FragmentModel, *, scored: bool) -> tuple[Tensor | None, Fragments, Fragments]:
            with self.autocast():
                return self.replicas.fragments(model, batch, scored=scored)

        return BatchFunctions(
            scores=scores,
            scores_and_loss=scores_and_loss,
            loss=lambda own: self.losses[mining](own, positives=positives),
            boosting_loss=lambda own, anchor: self.boosting_loss(own, anchor, positives=positives),
            realignment_loss=lambda *scores: self.replicas.whole_loss(
                self.realignment_losses[mining](*scores), batch, mean=self.config.mean_loss
            ),
            fragments=fragments,
            run=lambda model, work: self.replicas.run(model, batch, work),
            whole_scores=lambda model, images, captions: self.replicas.whole_scores(model, images, captions, batch),
            whole=lambda model, sets: self.replicas.whole(model, sets, batch),
            total=lambda values: self.replicas.sum(values, batch),
            images=images_of(batch),
            read=self._read,
            batch=batch,
            autocast=self.autocast,
        )

    def _check_own(self, loss: Tensor, scores: Tensor, model: MatchingModel) -> None:
        """Raise ValueError if a user's loss, which each process computes whole, depends on weights of the model.

        Their gradients would be added up over the processes.
        """
        if not self._unchecked:
            return
        self._unchecked = False
        names = {weight: name for name, weight in model.named_parameters()}
        seen, ahead = {scores.grad_fn}, [loss.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            weight = getattr(node, "variable", None)
            if weight in names:
                raise ValueError(
                    f"loss: it depends on the weight {names[weight]} of the model otherwise than by the scores, which "
                    f"goes with a single process, got {self.world.size}; apply the weight in the model's score"
                )
            ahead += [one for one, _ in node.next_functions]

    def _read(self, captions: Tensor) -> Batch:
        rows, of_pictures = captions.cpu().numpy(), picture_augmentation(self.config, self._epoch)
        batch = self.data.batch(rows) if of_pictures is None else self.data.batch(rows, of_pictures)
        return self.augmentation(batch, self.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Set the precision of the forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except the weights of the target and the batch."""
        loss = self.losses.state_dict()
        parts = {"loss": loss} if loss else {}
        monitors = {"plateau": self.plateau.state_dict(), "gradients": self.gradients.state_dict()}
        return {**self.scenario.state_dict(), **parts, **monitors}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Restore the part of `state` that `state_dict` returned after `steps` steps, before the first step here.

        Raises:
            ValueError: the state does not belong to this configuration after `steps` steps. The message names the
                entry.
        """
        self.scenario.load_state_dict(state, steps)
        if loss := self.losses.state_dict():
            check_like(state.get("loss"), loss, "loss")
            self.losses.load_state_dict(state["loss"])
        # Those of the scores are newer.
        newer = {"steps_equal": MayLack(0), "widest": MayLack(0.0)}
        check_like(state["plateau"], {**self.plateau.state_dict(), **newer}, "plateau")
        self.plateau.load_state_dict(state["plateau"])
        gradients = state.get("gradients", self.gradients.state_dict())  # States of earlier versions have none.
        check_like(gradients, self.gradients.state_dict(), "gradients")
        self.gradients.load_state_dict(gradients)
