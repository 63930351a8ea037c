"""A training step of one or more branches that learn from the same batch.

Inside: `Scenario`, `BatchFunctions`, `StepResult`, `Sets`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.data import Batch
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.training.branch import Branch
from itm_fast.training.state_check import check_like

__all__ = ["BatchFunctions", "Scenario", "Sets", "StepResult"]

# Fragments, or a tensor of one row for each set.
Sets = Any


@attrs.frozen
class BatchFunctions:
    """Functions of a scenario on the batch of a step.

    Attributes:
        scores: returns the scores (B, B) of the batch by a model; images are rows.
        scores_and_loss: returns the scores of a branch and their loss.
        loss: returns the loss of a branch's scores.
        boosting_loss: returns the boosting loss of a branch's scores and the scores of an anchor, which receive no
            gradient.
        realignment_loss: returns the loss of pairs with the negatives of another batch, as
            `itm_fast.losses.RealignmentLoss`. Each process passes its own pairs and gets the loss of all.
        fragments: returns the scores of a model, and regions and words of B sets each. Scores may be None with
            `scored=False`.
        run: calls a function that applies a model to this process's part of the batch.
        whole_scores: within `run`, returns the scores (B, B) of the batch from the embeddings of that part.
        whole: within `run`, returns the sets of the batch without gradient, from those of that part.
        total: sums a number of each pair, (B,). Each process has all numbers and differentiates its own pairs.
        images: (B,) int64, the image of each pair.
        read: returns other pairs of the training set by their captions, (n,) int64, on the device and augmented.
        batch: this process's part of the batch; a single process has all of it.
        autocast: sets the precision of a forward pass.
    """

    scores: Callable[[MatchingModel], Tensor]
    scores_and_loss: Callable[[MatchingModel], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor], Tensor]
    boosting_loss: Callable[[Tensor, Tensor], Tensor]
    realignment_loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    fragments: Callable[..., tuple[Tensor | None, Fragments, Fragments]]
    run: Callable[[MatchingModel, Callable[[], Any]], Any]
    whole_scores: Callable[[MatchingModel, Any, Any], Tensor]
    whole: Callable[[MatchingModel, Sets], Sets]
    total: Callable[[Tensor], Tensor]
    images: Tensor
    read: Callable[[Tensor], Batch]
    batch: Batch
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]


@attrs.frozen(eq=False)
class StepResult:
    """The result of a step for the target.

    Attributes:
        scores: the target's scores (B, B) before the step, without gradient; None if the step did not train it.
        own_loss: the target's loss without the boosting loss; None if the step did not train it.
        numbers: for the log: `loss`, the total that was minimised; `grad_norm` before clipping; `lr`; with anchors,
            `boosting_loss`, the mean over them; with realignment, `online_loss` of the fused feature and
            `realignment_loss`. Other phases of a scenario have other numbers.
    """

    scores: Tensor | None
    own_loss: float | None
    numbers: dict[str, float]


class Scenario:
    """Branches that learn together. A single branch without an anchor is ordinary training.

    All forward passes of a step come before any update. Branch k minimises its own loss plus `boosting_weight` times
    the mean of its boosting losses with its anchors. The anchors are the frozen model, if any, and the branches before
    it (Diao et al., Deep Boosting Learning, section III-C), or all other branches (Zhang et al., Deep Mutual Learning,
    CVPR 2018). The last branch is the target: the model that is validated and saved.

    Args:
        branches: at least one.
        boosting_weight: weight of the boosting losses.
        anchor: a model that does not learn. It scores in evaluation mode, without gradients.
        mutual: the anchors of a branch are all other ones, those behind it, too.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        boosting_weight: float,
        anchor: MatchingModel | None = None,
        *,
        mutual: bool = False,
    ) -> None:
        self.branches, self.boosting_weight, self.mutual = list(branches), boosting_weight, mutual
        self.anchor = None if anchor is None else anchor.requires_grad_(False).eval()

    @property
    def target(self) -> Branch:
        """Return the branch that is validated and saved."""
        return self.branches[-1]

    @property
    def models(self) -> list[MatchingModel]:
        """Return all models that score a batch: the learning ones and the anchor."""
        return [*(branch.model for branch in self.branches), *([] if self.anchor is None else [self.anchor])]

    def companions(self) -> list[MatchingModel]:
        """Return the models that are saved with the target: the branches before it."""
        return [branch.model for branch in self.branches[:-1]]

    @property
    def has_state(self) -> bool:
        """Return whether a state has an entry `scenario`; ordinary training has none."""
        return len(self.branches) > 1 or self.anchor is not None

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step of all branches; messages name it by `number`.

        Raises:
            ValueError: a loss or the norm of a gradient is not finite; no weight is changed then.
        """
        fixed = self._anchor_scores(batch)
        scored = [batch.scores_and_loss(branch.model.train()) for branch in self.branches]
        scores, results = [one for one, _ in scored], []
        for index, (branch, (_, own)) in enumerate(zip(self.branches, scored, strict=True)):
            others = [*scores[:index], *(scores[index + 1 :] if self.mutual else ())]
            anchors = [*fixed, *(other.detach() for other in others)]
            if anchors:
                boosting = torch.stack([batch.boosting_loss(scores[index], one) for one in anchors]).mean()
                numbers = branch.backward(own + self.boosting_weight * boosting, number)
                numbers["boosting_loss"] = float(boosting.detach())
            else:
                numbers = branch.backward(own, number)
            results.append(StepResult(scores[index].detach(), float(own.detach()), numbers))
        for branch, result in zip(self.branches, results, strict=True):
            result.numbers["lr"] = branch.update()
        return results[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except the weights of the target.

        This is the state of its optimiser, and as `scenario` that of the other branches and the anchor, if any.
        """
        others = [{"model": branch.model.state_dict(), **branch.state_dict()} for branch in self.branches[:-1]]
        return {**self.target.state_dict(), **self._scenario_part(others)}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Restore the part of `state` that `state_dict` returned after `steps` steps, before the first step here.

        Raises:
            ValueError: the state does not belong to this configuration after `steps` steps. The message names the
                entry.
        """
        self.target.load_state_dict(state, steps)
        others = [{"model": branch.model.state_dict(), **branch.expected_state(steps)} for branch in self.branches[:-1]]
        expected = self._scenario_part(others)
        if not expected:
            return
        check_like(state["scenario"], expected["scenario"], "scenario")
        kept_branches = state["scenario"].get("branches", [])
        for index, (branch, kept) in enumerate(zip(self.branches[:-1], kept_branches, strict=True)):
            branch.load_state_dict(kept, steps, f"scenario.branches.{index}.")
            branch.model.load_state_dict(kept["model"])
        if self.anchor is not None:
            self.anchor.load_state_dict(state["scenario"]["anchor"])

    def save_files(self, run: str | os.PathLike[str], data: str) -> None:
        """Write what does not fit into a state, before the state is saved; `data` identifies the data of the run."""

    def load_files(self, run: str | os.PathLike[str], data: str) -> None:
        """Read what `save_files` wrote, after `load_state_dict`; ValueError naming a file that does not fit."""

    def forget_files(self, run: str | os.PathLike[str]) -> None:
        """Remove what `save_files` wrote for earlier states, after the state is saved."""

    def _scenario_part(self, others: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the entry `scenario` of a state."""
        parts: dict[str, Any] = {"branches": others} if others else {}
        if self.anchor is not None:
            parts["anchor"] = self.anchor.state_dict()
        return {"scenario": parts} if parts else {}

    def _anchor_scores(self, batch: BatchFunctions) -> list[Tensor]:
        if self.anchor is None:
            return []
        with torch.no_grad():
            return [batch.scores(self.anchor)]
