"""Gradient sparsity: score all pairs without a graph, and differentiate only the pairs that the loss needs.

A loss that mines hard negatives sends a gradient to about three pairs per anchor out of all of them. So the forward
scores the matrix in bounded blocks without gradient, and the backward scores again, with gradient, what has a gradient
that is not zero. The result is that of the dense computation: the pairs left out would have contributed exactly 0.

What is scored again is the smallest part that gives the same numbers: single pairs, whole columns where the pairs of a
column depend on each other, or the whole matrix (`COUPLINGS`). A block that drew random numbers is scored again whole,
from the state that the generators had. What a call changes beside its result (running statistics) changes in the
forward alone; the backward starts from what it was then. Single pairs are scored again in parts of one row or column,
or, by who can do so, as a list (`Listed`): a few large steps instead of many small ones.

Inside: `gradient_sparse_scores`, `Listed`, `Sets`, `COUPLINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.precision import autocast_state
from itm_fast.ops.replay import as_it_was, drew, random_state
from itm_fast.ops.sets import Sets, Side, side_of

__all__ = ["COUPLINGS", "Listed", "Score", "Sets", "gradient_sparse_scores"]

# Which scores depend on each other: none, those of one column, all.
COUPLINGS = ("pair", "caption", "batch")
# Pairs of a row or column, on average, from which on the CPU takes these together: measured with RCAR at full width.
LIST_RUN = 16
# (weights, state, rows, columns, numbers of the rows, numbers of the columns) -> scores (n_rows, n_columns). The state
# is None in the forward; in the backward it is what `snapshot` gave before the block was scored.
Score = Callable[[Sequence[Tensor], Any, Sets, Sets, Tensor, Tensor], Tensor]


@attrs.frozen
class Listed:
    """How a list of pairs is scored, which need not make a rectangle of rows and columns.

    Attributes:
        score: as a `Score`, for as many rows as columns, one of each for each pair and repeats among them: scores (n,).
        chunk_pairs: pairs of a call, at most.
    """

    score: Score
    chunk_pairs: int


def gradient_sparse_scores(
    score: Score,
    weights: Sequence[Tensor],
    rows: Sets,
    columns: Sets,
    *,
    coupling: str = "pair",
    chunk_pairs: int,
    snapshot: Callable[[], Any] = lambda: None,
    whole: Score | None = None,
    listed: Listed | None = None,
) -> Tensor:
    """Scores `(n_rows, n_columns)` of all pairs, whose backward scores again only what has a gradient.

    Args:
        score: scores a block of the matrix.
        weights: what it depends on beside rows and columns, and may have gradients.
        rows, columns: the two kinds of sets.
        coupling: which scores depend on each other, one of `COUPLINGS`.
        chunk_pairs: pairs of a block, about; a block has at least one whole unit of the coupling.
        snapshot: copies what a call of `score` changes beside its result; called before each block.
        whole: takes the place of `score` in the forward, where it scores all pairs at once in bounded memory; for a
            score that draws no random numbers and changes nothing beside its result.
        listed: takes the place of `score` in the backward, for such a score whose pairs do not depend on each other.
    """
    row_side, row_tensors = side_of("images", rows)
    column_side, column_tensors = side_of("captions", columns)
    tensors = (*row_tensors, *column_tensors, *weights)
    refuse_transforms("gradient_sparse_scores", *tensors)
    plan = _Plan(score, row_side, column_side, coupling, chunk_pairs, snapshot, whole, listed)
    return _GradientSparse.apply(plan, *tensors)


@attrs.frozen
class _Block:
    rows: range
    columns: range
    state: Any  # what `snapshot` gave before the block was scored
    random: Any  # the states of the generators before it, where it drew from them


@attrs.frozen
class _Part:
    """What is scored again at once."""

    rows: Tensor
    columns: Tensor
    state: Any
    random: Any
    listed: bool  # a pair of each row and column number; else all pairs of a row and a column

    def of(self, grad: Tensor) -> Tensor:
        return grad[self.rows, self.columns] if self.listed else grad[self.rows[:, None], self.columns]

    def add(self, gradient: Tensor, place: Any, total: Tensor) -> None:
        """Adds the gradient of a tensor's chosen rows to those of all, in the same order whenever it is done."""
        if not self.listed or place is ...:
            # The rows of one part differ from each other: no two threads of a GPU add to the same one.
            total[place] += gradient
        elif total.is_cuda:
            total.index_put_((place,), gradient.to(total.dtype), accumulate=True)  # Sorts; index_add_ would race.
        else:
            total.index_add_(0, place, gradient.to(total.dtype))


@attrs.frozen
class _Plan:
    score: Score
    rows: Side
    columns: Side
    coupling: str
    chunk_pairs: int
    snapshot: Callable[[], Any]
    whole: Score | None
    listed: Listed | None

    def blocks(self) -> Iterator[tuple[range, range]]:
        """The parts of the matrix that are scored together, row and column numbers."""
        n_rows, n_columns = self.rows.count, self.columns.count
        if n_rows == 0 or n_columns == 0:
            return
        row_step = min(n_rows, self.chunk_pairs) if self.coupling == "pair" else n_rows
        column_step = n_columns if self.coupling == "batch" else max(1, self.chunk_pairs // row_step)
        for column in range(0, n_columns, column_step):
            for row in range(0, n_rows, row_step):
                yield range(row, min(row + row_step, n_rows)), range(column, min(column + column_step, n_columns))

    def again(self, blocks: Sequence[_Block], grad: Tensor) -> Iterator[_Part]:
        """What must be scored again."""
        pairs = (grad != 0).nonzero()  # A NaN is not equal to 0, either: it counts as a gradient.
        # On a GPU every part costs hundreds of launches, and sums over packed rows race.
        if self.listed is not None and (not grad.is_cpu or _is_sparse(pairs)):
            for side, numbers in ((self.columns, 1), (self.rows, 0)):
                lengths = side.lengths()
                if lengths is not None:
                    # Pairs of similar sizes stand together: they are padded to the longest of a list.
                    pairs = pairs[torch.argsort(lengths[pairs[:, numbers]], stable=True)]
            for start in range(0, len(pairs), self.listed.chunk_pairs):
                part = pairs[start : start + self.listed.chunk_pairs]
                yield _Part(part[:, 0], part[:, 1], None, None, listed=True)
            return
        for block in blocks:
            for rows, columns in self._of_block(block, grad):
                yield _Part(rows, columns, block.state, block.random, listed=False)

    def _of_block(self, block: _Block, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Row and column numbers of each part of a block that must be scored again."""
        rows, columns = _numbers(block.rows, grad.device), _numbers(block.columns, grad.device)
        needed = grad[block.rows.start : block.rows.stop, block.columns.start : block.columns.stop] != 0
        of_rows, of_columns = (needed.any(dim=dim).nonzero()[:, 0] for dim in (1, 0))
        if len(of_rows) == 0:
            return
        if block.random is not None or self.coupling == "batch":
            yield rows, columns
        elif self.coupling == "caption":
            yield rows, columns[of_columns]
        elif len(of_columns) <= len(of_rows):
            for column in of_columns.tolist():
                yield rows[needed[:, column]], columns[column : column + 1]
        else:
            for row in of_rows.tolist():
                yield rows[row : row + 1], columns[needed[row]]

    def call(
        self,
        score: Score,
        tensors: Sequence[Tensor],
        needed: Sequence[bool],
        state: Any,
        rows: Tensor,
        columns: Tensor,
        listed: bool = False,
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        """Scores of a part, the leaves of its graph, one per tensor, and which rows of the tensor each stands for."""
        middle, end = len(self.rows.parts), len(self.rows.parts) + len(self.columns.parts)
        row_sets, row_values, row_places = self.rows.select(rows, tensors[:middle], not listed)
        column_sets, column_values, column_places = self.columns.select(columns, tensors[middle:end], not listed)
        weights = [weight.detach() for weight in tensors[end:]]
        leaves = [*row_values, *column_values, *weights]
        for leaf, wanted in zip(leaves, needed, strict=True):
            leaf.requires_grad_(wanted)
        scores = score(weights, state, row_sets, column_sets, rows, columns)
        shape = (len(rows),) if listed else (len(rows), len(columns))
        if not isinstance(scores, Tensor) or scores.shape != shape:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"scores: expected shape {shape} of the pairs asked for, got {got}")
        return scores, leaves, [*row_places, *column_places, *[...] * len(weights)]


class _GradientSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Tensor:
        device = tensors[0].device
        differentiated, nothing = any(ctx.needs_input_grad), [False] * len(tensors)
        scores = None
        ctx.plan, ctx.blocks, ctx.autocast = plan, [], autocast_state(device.type)
        ctx.save_for_backward(*tensors)
        if plan.whole is not None:
            ctx.blocks = [_Block(rows, columns, None, None) for rows, columns in plan.blocks()]
            all_rows, all_columns = (_numbers(range(side.count), device) for side in (plan.rows, plan.columns))
            return plan.call(plan.whole, tensors, nothing, None, all_rows, all_columns)[0]
        for rows, columns in plan.blocks():
            state = plan.snapshot() if differentiated else None
            before = random_state(device) if differentiated else ()
            part, _, _ = plan.call(
                plan.score, tensors, nothing, None, _numbers(rows, device), _numbers(columns, device)
            )
            if scores is None:
                scores = part.new_empty(plan.rows.count, plan.columns.count)
            scores[rows.start : rows.stop, columns.start : columns.stop] = part
            replayed = differentiated and drew(before, device)
            ctx.blocks.append(_Block(rows, columns, state, before if replayed else None))
        if scores is not None:
            return scores
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return tensors[0].new_zeros(plan.rows.count, plan.columns.count, dtype=dtype)

    @staticmethod
    @first_order("gradient_sparse_scores")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        # Sums of many parts are taken in float32 at least.
        sums = [
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if wanted else None
            for tensor, wanted in zip(tensors, needed, strict=True)
        ]
        plan = ctx.plan
        for part in plan.again(ctx.blocks, grad):
            score = plan.listed.score if part.listed else plan.score
            with torch.enable_grad(), as_it_was(ctx.autocast, part.random, grad.device):
                scores, leaves, places = plan.call(
                    score, tensors, needed, part.state, part.rows, part.columns, part.listed
                )
            if not scores.requires_grad:
                continue
            wanted = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
            outer = part.of(grad).to(scores.dtype)
            found = torch.autograd.grad(scores, [leaves[place] for place in wanted], outer, allow_unused=True)
            for place, gradient in zip(wanted, found, strict=True):
                total = sums[place]
                if gradient is not None and total is not None:
                    part.add(gradient, places[place], total)
        pairs = zip(sums, tensors, strict=True)
        return (None, *(None if total is None else total.to(tensor.dtype) for total, tensor in pairs))


def _is_sparse(pairs: Tensor) -> bool:
    """Whether a list of pairs costs less than parts of one row or one column each, in which pairs share a set."""
    runs = min(len(numbers.unique()) for numbers in pairs.unbind(1))
    return len(pairs) < LIST_RUN * runs


def _numbers(numbers: range, device: torch.device) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, device=device)
