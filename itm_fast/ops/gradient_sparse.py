"""Gradient sparsity: score all pairs without a graph, and differentiate only the pairs that the loss needs.

A loss over hard negatives has a non-zero gradient for about three pairs per anchor. The forward scores the matrix in
blocks without a graph. The backward scores the pairs with a non-zero gradient again, with a graph. The gradients equal
those of the dense computation: the other pairs would contribute exactly 0.

The backward recomputes the smallest part that gives the same values: single pairs, whole columns if the pairs of a
column depend on each other, or the whole matrix (`COUPLINGS`). A block that drew random numbers is recomputed as a
whole, from its original generator states. Only the forward has side effects (running statistics); the backward starts
from the state before them. Single pairs are recomputed in parts of one row or column or, if the score supports it, as a
list (`Listed`): a few large steps instead of many small ones. On a GPU a part has several rows or columns, and so pairs
without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import check_has_values
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.precision import autocast_state
from itm_fast.ops.replay import as_it_was, drew, random_state
from itm_fast.ops.sets import Sets, Side, side_of

__all__ = ["COUPLINGS", "Listed", "Score", "Sets", "gradient_sparse_scores"]

# Scores that depend on each other: none, those of one column, all.
COUPLINGS = ("pair", "caption", "batch")
# Most pairs of a group of consecutive rows or columns that a GPU scores together, including pairs without a gradient: a
# part costs hundreds of launches, on an H200 about as much time as these pairs (measured with SGRAF).
GROUPED_PAIRS = 256
# Mean number of pairs per row or column from which the CPU scores a row or column together (measured with RCAR).
LIST_RUN = 16
# (weights, state, rows, columns, row indices, column indices) -> scores (n_rows, n_columns). The state is None in the
# forward. In the backward it is the result of `snapshot` before the block was scored.
Score = Callable[[Sequence[Tensor], Any, Sets, Sets, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Listed:
    """Score function for an arbitrary list of pairs.

    Attributes:
        score: like `Score`, but scores row i with column i and returns (n,). Rows and columns may repeat.
        chunk_pairs: maximum number of pairs per call.
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
    """Score all pairs; the backward recomputes only the pairs with a non-zero gradient.

    Args:
        score: scores a block of the matrix.
        weights: tensors on which `score` depends, in addition to rows and columns. They may require gradients.
        rows, columns: the sets of the two sides.
        coupling: scores that depend on each other, one of `COUPLINGS`.
        chunk_pairs: approximate number of pairs per block. A block holds at least one unit of the coupling.
        snapshot: copies the state that `score` changes as a side effect; called before each block.
        whole: replaces `score` in the forward and scores all pairs in one call in bounded memory. Requires a score
            without random numbers and side effects.
        listed: replaces `score` in the backward. Requires a score without random numbers, side effects and coupling.

    Returns:
        Scores `(n_rows, n_columns)`.
    """
    row_side, row_tensors = side_of("images", rows)
    check_has_values("images", row_tensors[0])
    column_side, column_tensors = side_of("captions", columns)
    tensors = (*row_tensors, *column_tensors, *weights)
    refuse_transforms("gradient_sparse_scores", *tensors)
    plan = _Plan(score, row_side, column_side, coupling, chunk_pairs, snapshot, whole, listed)
    return _GradientSparse.apply(plan, *tensors)


@dataclass(frozen=True)
class _Block:
    rows: range
    columns: range
    state: Any  # result of `snapshot` before the block was scored
    random: Any  # generator states before the block, if it drew random numbers


@dataclass(frozen=True)
class _Part:
    """Pairs that the backward scores together."""

    rows: Tensor
    columns: Tensor
    state: Any
    random: Any
    listed: bool  # True: row i with column i. False: all rows with all columns
    needed: Tensor | None = None  # of a group of several lines, bool (rows, columns) on the CPU: pairs with a gradient

    def of(self, grad: Tensor) -> Tensor:
        return grad[self.rows, self.columns] if self.listed else grad[self.rows[:, None], self.columns]

    def add(self, gradient: Tensor, place: Any, total: Tensor) -> None:
        """Add the gradient of selected rows to the gradient of the whole tensor, in a deterministic order."""
        if not self.listed or place is ...:
            # The rows of one part are unique, so no two GPU threads add to the same row.
            total[place] += gradient
        elif total.is_cuda:
            total.index_put_((place,), gradient.to(total.dtype), accumulate=True)  # Sorts; index_add_ would race.
        else:
            total.index_add_(0, place, gradient.to(total.dtype))


@dataclass(frozen=True)
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
        """Yield the row and column indices of each block of the matrix."""
        n_rows, n_columns = self.rows.count, self.columns.count
        if n_rows == 0 or n_columns == 0:
            return
        row_step = min(n_rows, self.chunk_pairs) if self.coupling == "pair" else n_rows
        column_step = n_columns if self.coupling == "batch" else max(1, self.chunk_pairs // row_step)
        for column in range(0, n_columns, column_step):
            for row in range(0, n_rows, row_step):
                yield range(row, min(row + row_step, n_rows)), range(column, min(column + column_step, n_columns))

    def again(self, blocks: Sequence[_Block], grad: Tensor) -> Iterator[_Part]:
        """Yield the parts that the backward must score."""
        pairs = (grad != 0).nonzero()  # NaN != 0, so NaN counts as a gradient.
        # On a GPU, each part costs hundreds of launches, and sums over packed rows are not deterministic.
        if self.listed is not None and (not grad.is_cpu or _is_sparse(pairs)):
            for side, numbers in ((self.columns, 1), (self.rows, 0)):
                lengths = side.lengths()
                if lengths is not None:
                    # Group pairs of similar sizes, because a list is padded to its longest pair.
                    pairs = pairs[torch.argsort(lengths[pairs[:, numbers]], stable=True)]
            for start in range(0, len(pairs), self.listed.chunk_pairs):
                part = pairs[start : start + self.listed.chunk_pairs]
                yield _Part(part[:, 0], part[:, 1], None, None, listed=True)
            return
        for block in blocks:
            yield from self._of_block(block, grad)

    def _of_block(self, block: _Block, grad: Tensor) -> Iterator[_Part]:
        """Yield the parts of a block that the backward must score."""

        def part(rows: Tensor, columns: Tensor) -> _Part:
            return _Part(rows, columns, block.state, block.random, listed=False)

        rows, columns = _numbers(block.rows, grad.device), _numbers(block.columns, grad.device)
        needed = grad[block.rows.start : block.rows.stop, block.columns.start : block.columns.stop] != 0
        of_rows, of_columns = (needed.any(dim=dim).nonzero()[:, 0] for dim in (1, 0))
        if len(of_rows) == 0:
            return
        if block.random is not None or self.coupling == "batch":
            yield part(rows, columns)
        elif self.coupling == "caption":
            yield part(rows, columns[of_columns])
        else:
            most = min(self.chunk_pairs, _pairs_together(grad.device))
            yield from _grouped(part(rows, columns), needed.cpu(), len(of_columns) <= len(of_rows), most)

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
        """Return the scores of a part, the leaves of its graph (one per tensor), and the source rows of each leaf."""
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
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = saved, ctx.needs_input_grad[1:]
        # Accumulate in float32 or higher.
        sums = [
            torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if wanted else None
            for tensor, wanted in zip(tensors, needed, strict=True)
        ]
        plan = ctx.plan

        def add(part: _Part) -> None:
            score = plan.listed.score if part.listed else plan.score
            with torch.enable_grad(), as_it_was(ctx.autocast, part.random, grad.device):
                scores, leaves, places = plan.call(
                    score, tensors, needed, part.state, part.rows, part.columns, part.listed
                )
            if not scores.requires_grad:
                return
            wanted = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
            outer = part.of(grad).to(scores.dtype)
            found = torch.autograd.grad(scores, [leaves[place] for place in wanted], outer, allow_unused=True)
            if part.needed is not None and not _all_finite(found):
                # A pair without a gradient may have no derivative: 0 times infinity.
                for line in _grouped(part, part.needed, True, 0):
                    add(line)
                return
            for place, gradient in zip(wanted, found, strict=True):
                total = sums[place]
                if gradient is not None and total is not None:
                    part.add(gradient, places[place], total)

        for part in plan.again(ctx.blocks, grad):
            add(part)
        pairs = zip(sums, tensors, strict=True)
        return (None, *(None if total is None else total.to(tensor.dtype) for total, tensor in pairs))


def _is_sparse(pairs: Tensor) -> bool:
    """Return whether scoring a list of pairs is cheaper than scoring parts of one row or one column."""
    runs = min(len(numbers.unique()) for numbers in pairs.unbind(1))
    return len(pairs) < LIST_RUN * runs


def _pairs_together(device: torch.device) -> int:
    """Return the most pairs of several rows or columns that are scored together; 0: one row or column at a time."""
    return 0 if device.type == "cpu" else GROUPED_PAIRS


def _numbers(numbers: range, device: torch.device) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, device=device)


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def _grouped(whole: _Part, needed: Tensor, by_column: bool, most: int) -> Iterator[_Part]:
    """Yield the groups of `whole` that hold all needed pairs, by `_groups` of its columns or rows.

    Args:
        needed: bool (rows, columns), on the CPU.
    """
    groups = list(_groups(needed.t() if by_column else needed, most))
    if not groups:
        return
    # One copy: each waits for a GPU.
    indices = torch.cat([index for group in groups for index in group]).to(whole.rows.device)
    sizes = [len(index) for group in groups for index in group]
    found = iter(indices.split(sizes))
    for lines, others in groups:
        on_device = next(found), next(found)
        rows, columns = reversed(on_device) if by_column else on_device
        here = (others, lines) if by_column else (lines, others)
        held = needed[here[0][:, None], here[1]] if len(lines) > 1 else None
        yield replace(whole, rows=whole.rows[rows], columns=whole.columns[columns], needed=held)


def _groups(needed: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield groups of consecutive lines that need something: their indices, and those of the other side that any needs.

    A group has at most `most` pairs of its lines with these, or a single line.

    Args:
        needed: bool (lines, others), on the CPU.
    """
    lines: list[int] = []
    union = needed.new_zeros(needed.shape[1])
    for line in needed.any(dim=1).nonzero()[:, 0].tolist():
        more = union | needed[line]
        if lines and (len(lines) + 1) * int(more.sum()) > most:
            yield torch.tensor(lines), union.nonzero()[:, 0]
            lines, more = [], needed[line]
        lines.append(line)
        union = more
    if lines:
        yield torch.tensor(lines), union.nonzero()[:, 0]
