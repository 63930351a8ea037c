"""Train one model in several processes: each encodes its part of a batch, and all get the scores of the whole batch.

Each process scores all images with its own captions, that is, whole columns. A score that depends on one caption with
all images, such as SAF's in training, therefore equals that of a single process. The loss of the gathered scores is the
same in all processes. Each differentiates its own columns, and the gradients add up to those of the whole batch.

Inside: `Replicas`, `GatheredScores`, `check_shared`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from itm_fast.data import Batch
from itm_fast.distributed import World, gather_columns, gather_rows, gather_sets, none_of, sum_of_all
from itm_fast.fragments import Fragments
from itm_fast.losses import TripletLoss
from itm_fast.models.base import MatchingModel
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.training.shared_norms import share_norms, shared_norms
from itm_fast.training.shares import SharedBatch

__all__ = ["GatheredScores", "Replicas", "check_shared"]

_STATISTICS = ("running_mean", "running_var")
# Its name in torch 2.13 and newer, which warn of the other one.
_NEW = "forward_sync_buffers"
_NO_BUFFERS: dict[str, Any] = {
    _NEW if _NEW in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


def check_shared(models: Iterable[MatchingModel], world: World) -> None:
    """Raise ValueError if several processes cannot share a batch with one of `models`."""
    if world.size == 1:
        return
    for model in models:
        if any(getattr(part, "coupling", None) == "batch" for part in model.modules()):
            raise ValueError(
                f"model: {model.name} scores the captions of a batch together, which {world.size} processes share"
            )
        owner = next(one for one in type(model).__mro__ if "forward" in vars(one))
        # The built-in ones only add a loss of their own, which is refused elsewhere.
        if owner is not MatchingModel and "auxiliary_setting" not in vars(owner):
            raise ValueError(
                f"model: {model.name} overrides forward, which {world.size} processes do not call; override "
                "encode_images, encode_captions or score"
            )


class GatheredScores(nn.Module):
    """Compute the scores (B, B) of a whole batch; each process encodes and scores its part.

    Running statistics of the parts are averaged over all items.

    Args:
        model: encodes and scores; a column of its scores may depend on all images, but on no other caption
            (`check_shared`).
        world: the processes.
        micro_batch: number of items of a process's part to encode at a time, as in `MatchingModel.encode`.
    """

    def __init__(self, model: MatchingModel, world: World, micro_batch: int | None = None) -> None:
        super().__init__()
        self.model, self.world, self.micro_batch = model, world, micro_batch
        self._norms = shared_norms(model)
        # Those that each process has by itself.
        self._apart = [part for part in model.modules() if not any(part is one for one in self._norms)]

    def forward(self, batch: SharedBatch, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, in which the model processes this process's part of `batch`."""
        for norm in self._norms:
            norm.counted = batch.counts[self.world.rank] > 0
        return work()

    def scores_of(self, batch: SharedBatch) -> Tensor:
        """Return the scores of the whole batch."""
        return self.scores(*self.model.encode(*self._own(batch)), batch.counts)[0]

    def fragments_of(self, batch: SharedBatch) -> tuple[Tensor, Fragments, Fragments]:
        """Return the scores, regions and words of the whole batch, with gradients."""
        encoded = cast(FragmentModel, self.model).encode_fragments(*self._own(batch))
        scores, images = self.scores(encoded.images, encoded.captions, batch.counts)
        regions = images if encoded.regions is encoded.images else self.gathered(encoded.regions, batch.counts)
        return scores, regions, self.gathered(encoded.words, batch.counts)

    def _own(self, batch: SharedBatch) -> tuple[Any, ...]:
        return batch.features, batch.token_ids, batch.lengths, self.encoded_at_a_time(batch.counts)

    def encoded_at_a_time(self, counts: Sequence[int]) -> int | None:
        """Return `micro_batch`, or one less if some processes would encode their items at once and others in parts.

        The gradients of weights arrive at different times in these two cases, but all processes must send them in the
        same order. The numbers of items differ by at most one.
        """
        if self.micro_batch is None or not min(counts) <= self.micro_batch < max(counts):
            return self.micro_batch
        return self.micro_batch - 1 or None

    def scores(self, images: Any, captions: Any, counts: Sequence[int]) -> tuple[Tensor, Any]:
        """Return scores (B, B) of the whole batch, and all images, from this process's embeddings or a stand-in."""
        # After both encoders, so that in the backward the gradients of images travel before any weight's.
        everything = self.gathered(images, counts)
        own = self.model.score(everything, captions)[:, : counts[self.world.rank]]
        scores = gather_columns(own, counts, self.world)
        if self.model.training:
            first, counted = sum(counts[: self.world.rank]), counts[self.world.rank] > 0
            seen = captions if counted else none_of(captions)
            self.model.observe(everything, seen, own.detach(), first=first, total=self._total)
            self._mean_statistics(counts)
        return scores, everything

    def gathered(self, sets: Any, counts: Sequence[int]) -> Any:
        """Return the sets of the whole batch; `sets` are those of this process, or a stand-in."""
        return gather_sets(sets if counts[self.world.rank] else none_of(sets), counts, self.world)

    def _total(self, own: Tensor) -> Tensor:
        """Add up a tensor over all processes."""
        together = own.clone()
        dist.all_reduce(together, group=self.world.group)
        return together

    @torch.no_grad()
    def _mean_statistics(self, counts: Sequence[int]) -> None:
        # Frozen statistics are equal, and a mean would round them.
        learning = [part for part in self._apart if part.training]
        places = [(part, name) for part in learning for name in _STATISTICS if name in part._buffers]
        found = [getattr(part, name) for part, name in places]
        if not found:
            return
        share = counts[self.world.rank] / sum(counts)
        together = torch.cat([share * one.flatten() for one in found])
        dist.all_reduce(together, group=self.world.group)
        means = together.split([one.numel() for one in found])
        for (part, name), one, mean in zip(places, found, means, strict=True):
            # Not in place: the graph of the forward holds the one before.
            setattr(part, name, mean.view_as(one).to(one.dtype, copy=True))


class Replicas:
    """Compute the scores of a batch by any model of a run. Its weights are the same in all processes.

    Args:
        world: the processes.
        learning: the models that learn. Each gets a wrapper that sums its gradients over the processes. All parameters
            take part in every step, so the wrapper need not search for unused ones.
        micro_batch: number of items of a process's part to encode at a time, as in `MatchingModel.encode`.
    """

    def __init__(self, world: World, learning: Sequence[MatchingModel], micro_batch: int | None = None) -> None:
        self.world, self._learning, self.micro_batch = world, list(learning), micro_batch
        self._plain: dict[MatchingModel, GatheredScores] = {}
        self._reduced: dict[MatchingModel, DistributedDataParallel] = {}
        self._counts: dict[MatchingModel, int] = {}

    def scores(self, model: MatchingModel, batch: Batch) -> Tensor:
        """Return scores (B, B) of the whole batch."""
        if not isinstance(batch, SharedBatch):
            return model(batch.features, batch.token_ids, batch.lengths, self.micro_batch)
        found: Tensor = self.run(model, batch, lambda: self._gathered(model).scores_of(batch))
        return found

    def scores_and_loss(
        self, model: MatchingModel, batch: Batch, loss: nn.Module, positives: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores (B, B) of the whole batch, and their loss if one call computes both, otherwise None.

        One call computes both in a single process if the model's scores are cross-attention alone, the loss is
        `TripletLoss` and no hook waits for a call of either.
        """
        scoring = model.attention_scores
        # A subclass of the loss may compute something else.
        if isinstance(batch, SharedBatch) or scoring is None or type(loss) is not TripletLoss:
            return self.scores(model, batch), None
        if _have_hooks(model, *scoring.modules, loss):
            return self.scores(model, batch), None
        images, captions = model.encode(batch.features, batch.token_ids, batch.lengths, self.micro_batch)
        value, scores = scoring.with_loss(images, captions, positives=positives, **loss.options)
        return scores, value

    def fragments(
        self, model: FragmentModel, batch: Batch, *, scored: bool = True
    ) -> tuple[Tensor | None, Fragments, Fragments]:
        """Return scores (B, B), and l2-normalised regions and words of B sets each, of the whole batch.

        A single process leaves out the scores unless `scored`.
        """
        if isinstance(batch, SharedBatch):
            found: tuple[Tensor, Fragments, Fragments]
            found = self.run(model, batch, lambda: self._gathered(model).fragments_of(batch))
            return found
        encoded = model.encode_fragments(batch.features, batch.token_ids, batch.lengths, self.micro_batch)
        scores = model.score(encoded.images, encoded.captions) if scored else None
        if scores is not None and model.training:
            model.observe(encoded.images, encoded.captions, scores.detach())
        return scores, encoded.regions, encoded.words

    def sum(self, values: Tensor, batch: Batch) -> Tensor:
        """Sum a number (B,) over the pairs of the whole batch. Each process differentiates its own pairs."""
        if not isinstance(batch, SharedBatch):
            return values.sum()
        first = sum(batch.counts[: self.world.rank])
        return sum_of_all(values[first : first + batch.counts[self.world.rank]].sum(), self.world)

    def run(self, model: MatchingModel, batch: Batch, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, in which `model` processes this process's part of a batch.

        Gradients of its weights are added up over the processes.
        """
        return self._wrapped(model, batch)(batch, work) if isinstance(batch, SharedBatch) else work()

    def whole_scores(self, model: MatchingModel, images: Any, captions: Any, batch: Batch) -> Tensor:
        """Within `run`, return scores (B, B) of the whole batch from this process's embeddings or a stand-in."""
        if not isinstance(batch, SharedBatch):
            return model.score(images, captions)
        return self._gathered(model).scores(images, captions, batch.counts)[0]

    def whole(self, model: MatchingModel, sets: Any, batch: Batch) -> Any:
        """Return the sets of the whole batch without gradient; `sets` are those of this process, or a stand-in."""
        if not isinstance(batch, SharedBatch):
            return sets.detach()
        return self._gathered(model).gathered(sets.detach(), batch.counts)

    def whole_rows(self, own: Tensor, batch: Batch) -> Tensor:
        """Return a row for each item of the whole batch, without gradient, from those of this process's items."""
        if not isinstance(batch, SharedBatch):
            return own.detach()
        return gather_rows(own[: batch.counts[self.world.rank]], batch.counts, self.world)

    def whole_loss(self, loss: Tensor, batch: Batch, *, mean: bool) -> Tensor:
        """Return the sum or `mean` over the pairs of the whole batch; `loss` is that of this process, or a stand-in."""
        if not isinstance(batch, SharedBatch):
            return loss
        own, everyone = batch.counts[self.world.rank], sum(batch.counts)
        return sum_of_all(loss * (own / everyone if mean else float(own > 0)), self.world)

    def _gathered(self, model: MatchingModel) -> GatheredScores:
        """Return the module that gathers for `model`, created when all processes first use it."""
        if model not in self._plain:
            # Processes encode different numbers of micro-batches, and would wait for each other's statistics. What
            # scores has all images in every process already.
            if self.micro_batch is None:
                share_norms(model, self.world, model.scoring_parts)
            self._plain[model] = GatheredScores(model, self.world, self.micro_batch)
        return self._plain[model]

    def _wrapped(self, model: MatchingModel, batch: SharedBatch) -> nn.Module:
        """Return the same module, wrapped to add up the gradients if the model learns."""
        gathered = self._gathered(model)
        if not torch.is_grad_enabled() or not any(model is one for one in self._learning):
            return gathered
        learning = sum(weight.requires_grad for weight in model.parameters())
        if self._counts.get(model) != learning:
            # A wrapper knows the weights that learn when it is made; those of a vision model may join later.
            self._reduced.pop(model, None)
        if model not in self._reduced:
            self._counts[model] = learning
            # Running statistics are no business of the wrapper's: `GatheredScores` has their mean.
            self._reduced[model] = DistributedDataParallel(gathered, process_group=self.world.group, **_NO_BUFFERS)
            # The wrapper looks at annotations, and takes none that are text.
            self._reduced[model].register_comm_hook(self.world.group, lambda group, bucket: _sum(group, bucket))
            _settle(self._reduced[model], batch)
        return self._reduced[model]


def _have_hooks(*modules: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in modules for kind in kinds)


def _settle(wrapped: nn.Module, batch: SharedBatch) -> None:
    """Run a first backward pass of zeros, so that the wrapper fixes the memory layout of the gradients.

    The wrapper reorders gradients after its first backward pass, and the order in which processes are added up depends
    on the position in memory. Without this pass, a resumed run, whose wrapper is new, would round a step differently
    from an uninterrupted run.
    """
    weights = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    wrapped(batch, lambda: torch.stack([weight.sum() for weight in weights]).sum() * 0.0).backward()
    for weight in weights:
        weight.grad = None


def _sum(group: dist.ProcessGroup | None, bucket: Any) -> Any:
    """Add gradients up instead of averaging them: the loss is that of the whole batch."""
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
