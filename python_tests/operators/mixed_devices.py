"""Call operators on tensors of two devices, without the checks in Python, and read the errors of the kernels.

Inside: `refusals`, `on_one_device`. The other device is "meta", whose tensors have no memory, so no GPU is needed. The
kernel of a device is called by its dispatch key; the dispatcher would choose a kernel by the arguments.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from itm_fast import Fragments
from itm_fast.functional import prepare

SCORES, MASK = torch.eye(3), torch.eye(3) > 2
VALUES, INDICES, NEGATIVES = torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
ROWS, OFFSETS, ONE = torch.ones(4, 8), torch.tensor([0, 1, 4]), torch.tensor(1.0)
TRIPLET = (0.2, "hardest", 0.0, "batch", False)
BOTH, BY_ROWS = (*TRIPLET, "both", "sum"), (*TRIPLET, "rows", "sum")
BOOSTING = ("absolute", "hardest", 0.2, 0.5, False, "both", "sum")
ATTENTION = (9.0, "clipped_l2norm", 0.1, "none", "mean", 6.0, "float32")
MATCHING = (*TRIPLET, "absolute", 0.5, False, "both", "sum")
OPERANDS = (ROWS, OFFSETS, ROWS, OFFSETS)
GRAMS = prepare(Fragments(ROWS, OFFSETS)).grams
OF_OPERANDS = ((1, "query_offsets", "queries"), (2, "contexts", "queries"), (3, "context_offsets", "queries"))
# One alignment of width 3 and its score.
WEIGHTS = [torch.ones(3, 8), torch.zeros(3), torch.ones(1, 3), torch.zeros(1)]
MEAN = (1, 0, 0, True, False, "tanh", False, True, True, "interleaved", True, False, "alignment", 9.0, 0.1, "none")
# The operands behind an incoming gradient.
OF_GRADIENT = (*((place + 1, name, like) for place, name, like in OF_OPERANDS), (5, "alignments", "queries"))
# Two pairs: their rows, discriminators and negatives.
PAIRS = (ROWS, OFFSETS, ROWS, OFFSETS, torch.ones(2, 8), torch.ones(2), *torch.tensor([[1, 0], [-1, 0]]).unbind())
RISKS, SUMS = torch.ones(5, 2), torch.ones(5, 2, 9)
OF_PAIRS = ("region_offsets", "words", "word_offsets", "weights", "biases", "negative_captions", "negative_images")
# Operator, arguments, and for each argument that may be on another device: its position, its name, and the argument
# that it must match.
CALLS: tuple[tuple[str, tuple[Any, ...], tuple[tuple[int, str, str], ...]], ...] = (
    ("triplet_loss", (SCORES, MASK, None, *BOTH), ((1, "positives", "scores"),)),
    ("triplet_loss", (SCORES, None, VALUES, *BY_ROWS), ((2, "positive_scores", "scores"),)),
    ("triplet_loss_with_gradient", (SCORES, MASK, None, *BOTH), ((1, "positives", "scores"),)),
    (
        "triplet_loss_backward",
        (ONE, SCORES, MASK, None, NEGATIVES, *BOTH),
        ((0, "grad_loss", "scores"), (2, "positives", "scores"), (4, "negatives", "scores")),
    ),
    ("scale_gradient", (SCORES.clone(), ONE), ((1, "factor", "gradient"),)),
    ("hardest_negatives", (SCORES, MASK), ((1, "positives", "scores"),)),
    (
        "hardest_negatives_backward",
        (VALUES, VALUES, SCORES, INDICES, INDICES),
        (
            (0, "grad_rows", "scores"),
            (1, "grad_columns", "scores"),
            (3, "row_indices", "scores"),
            (4, "column_indices", "scores"),
        ),
    ),
    (
        "boosting_loss",
        (SCORES, SCORES, MASK, *BOOSTING),
        ((1, "anchor_scores", "scores"), (2, "positives", "scores")),
    ),
    ("boosting_loss_with_gradient", (SCORES, SCORES, None, *BOOSTING), ((1, "anchor_scores", "scores"),)),
    (
        "boosting_loss_backward",
        (ONE, SCORES, SCORES, None, NEGATIVES[None], *BOOSTING),
        ((0, "grad_loss", "scores"), (2, "anchor_scores", "scores"), (4, "negatives", "scores")),
    ),
    (
        "domain_regularization",
        (*PAIRS, 0.05, "sum", True),
        tuple((place, name, "regions") for place, name in enumerate(OF_PAIRS, start=1)),
    ),
    (
        "domain_regularization_backward",
        (torch.ones(2), torch.ones(2), *PAIRS, RISKS, SUMS, 0.05, "sum", True, True, True),
        (
            (0, "grad_adversarial", "regions"),
            (1, "grad_regularization", "regions"),
            *((place, name, "regions") for place, name in enumerate(OF_PAIRS, start=3)),
            (10, "risks", "regions"),
            (11, "sums", "regions"),
        ),
    ),
    ("retrieval_ranks", (SCORES, INDICES, True), ((1, "caption_image", "scores"),)),
    (
        "cross_attention_scores",
        (*OPERANDS, *ATTENTION),
        OF_OPERANDS,
    ),
    (
        "cross_attention_scores_prepared",
        (*OPERANDS, GRAMS, *ATTENTION),
        (*OF_OPERANDS, (4, "grams", "contexts")),
    ),
    (
        "matching_loss",
        (*OPERANDS, torch.eye(2), torch.eye(2) > 2, "sum", *ATTENTION, *ATTENTION[:-1], *MATCHING),
        (*OF_OPERANDS, (4, "anchor_scores", "scores"), (5, "positives", "scores")),
    ),
    ("cross_attention_grams", OPERANDS[2:], ((1, "context_offsets", "contexts"),)),
    (
        "cross_attention_alignments",
        (*OPERANDS, WEIGHTS[:2], 0, True, *ATTENTION[:4], "float32"),
        (*OF_OPERANDS, (4, "alignments", "queries")),
    ),
    (
        "regulated_scores",
        (*OPERANDS, WEIGHTS, *MEAN, 0.4, torch.tensor([5]), "float32"),
        (*OF_OPERANDS, (4, "alignments", "queries"), (22, "seed", "queries")),
    ),
    (
        "cross_attention_alignments_backward",
        (torch.ones(2, 4, 3), *OPERANDS, WEIGHTS[:2], 0, True, *ATTENTION[:4], "float32"),
        ((0, "grad_alignments", "queries"), *OF_GRADIENT),
    ),
    (
        "regulated_scores_backward",
        (torch.eye(2), *OPERANDS, WEIGHTS, *MEAN, 0.4, torch.tensor([5]), "float32"),
        ((0, "grad_scores", "query_offsets"), *OF_GRADIENT, (23, "seed", "queries")),
    ),
    ("maxsim_scores", (*OPERANDS, None, "sum", "both", "float32"), OF_OPERANDS),
    (
        "maxsim_scores_backward",
        (torch.ones(1), *OPERANDS, torch.tensor([[0, 0]]), "sum", "both", "float32", 3, 3, True, True),
        (
            (0, "grad_scores", "queries"),
            *((place + 1, name, other) for place, name, other in OF_OPERANDS),
            (5, "pairs", "queries"),
        ),
    ),
    (
        "cross_attention_scores_backward",
        (torch.eye(2), *OPERANDS, *ATTENTION, True, True),
        (
            (0, "grad_scores", "query_offsets"),
            (2, "query_offsets", "queries"),
            (3, "contexts", "queries"),
            (4, "context_offsets", "queries"),
        ),
    ),
)


def _elsewhere(part: Any) -> Any:
    return [each.to("meta") for each in part] if isinstance(part, list) else part.to("meta")


def _said(key: str, operator: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the first line of the error that the kernel raises; None if it accepts the arguments."""
    try:
        getattr(torch.ops.itm_fast, operator).default._op_dk(getattr(torch._C.DispatchKey, key), *arguments)
    except RuntimeError as error:
        return re.sub(r"^\w+, \S+:\d+, ", "", str(error).splitlines()[0])  # Drop the source location.
    return None


def _registered(key: str) -> list[tuple[str, tuple[Any, ...], tuple[tuple[int, str, str], ...]]]:
    return [call for call in CALLS if torch._C._dispatch_has_kernel_for_dispatch_key(f"itm_fast::{call[0]}", key)]


def refusals(key: str) -> tuple[set[str], list[str]]:
    """Call each operator with one argument on another device; return the operators and the missing or wrong errors."""
    wrong = []
    for operator, arguments, others in _registered(key):
        for place, name, like in others:
            mixed = [_elsewhere(part) if i == place else part for i, part in enumerate(arguments)]
            said = _said(key, operator, tuple(mixed))
            if said != f"{name}: expected it on cpu like {like}, got another device":
                wrong.append(f"{operator}, {name}: {said}")
    return {operator for operator, _, _ in _registered(key)}, wrong


def on_one_device(key: str) -> dict[str, str | None]:
    """Return the errors of the operators if all tensors are on the CPU."""
    return {operator: _said(key, operator, arguments) for operator, arguments, _ in _registered(key)}
