"""The number of kernels that an operator launches on this GPU, as the profiler reports them."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

import itm_fast.functional as F_itm
from python_tests.helpers.devices import (
    Case,
    inputs_of,
    launched,
    names_on_device,
    on_devices,
    past_the_room,
    run_case,
)
from python_tests.helpers.fragments import native_calls, random_fragments

# Maximum number of launches, those of the table in docs/internals/design.md. Risks: the backward has one launch for
# discriminators and one for features. Scores: operands, pairs; their backward: lists, then everything else. Scores with
# their loss: operands; then pairs, loss and gradient. Regulators: operands, pairs; their backward: operands, then
# everything else. Ranks: the best matching scores, then the ranks. MaxSim: plan and pairs; the backward also gathers
# rows.
AT_MOST = {
    "cross_attention_alignments": 2,
    "cross_attention_alignments_backward": 2,
    "cross_attention_scores": 2,
    "cross_attention_scores_backward": 2,
    "domain_regularization": 1,
    "domain_regularization_backward": 2,
    "triplet_loss": 1,
    "triplet_loss_backward": 1,
    "triplet_loss_with_gradient": 1,
    "boosting_loss": 1,
    "boosting_loss_backward": 1,
    "boosting_loss_with_gradient": 1,
    "scale_gradient": 1,
    "hardest_negatives": 1,
    "hardest_negatives_backward": 1,
    "matching_loss": 2,
    "maxsim_scores": 2,
    "maxsim_scores_backward": 3,
    "regulated_scores": 2,
    "regulated_scores_backward": 2,
    "retrieval_ranks": 2,
}


@on_devices("cuda")
def test_an_operator_launches_few_kernels(device: str, case: Case, record_property: pytest.Fixture) -> None:
    for size in (9, 70):
        with native_calls() as calls:
            run_case(F_itm, case, inputs_of(case, 0, size, torch.float32, device))
        for name, (arguments, _) in calls:
            detached = [part.detach() if isinstance(part, torch.Tensor) else part for part in arguments]
            names = launched(lambda name=name, detached=detached: getattr(torch.ops.itm_fast, name)(*detached))
            ours = [kernel for kernel in names if "itm_fast::" in kernel]
            record_property(f"launches of {name} at {size}", len(ours))
            assert 1 <= len(ours) <= AT_MOST[name], names


def test_pairs_past_the_room_take_no_more_launches() -> None:
    case = past_the_room()
    with native_calls() as calls:
        run_case(F_itm, case, inputs_of(case, 0, 60, torch.float32, "cuda"))
    name, (arguments, _) = calls[-1]
    assert name == "cross_attention_scores_backward"
    detached = [part.detach() if isinstance(part, torch.Tensor) else part for part in arguments]
    names = launched(lambda: torch.ops.itm_fast.cross_attention_scores_backward(*detached))
    ours = [re.search(r"(\w+)_kernel", kernel)[1] for kernel in names if "itm_fast::" in kernel]
    assert ours == ["list_pairs", "backpropagate_pairs"]


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_a_step_is_five_kernels_and_two_fills(attention: str) -> None:
    """A hardest-negative step of SCAN. PyTorch adds no copy, although the scores of "t2i" are transposed."""
    queries, contexts = (random_fragments([rows] * 20, 64, torch.float32, seed=rows).to("cuda") for rows in (9, 12))
    leaves = [side.values.requires_grad_() for side in (queries, contexts)]
    incoming = torch.ones((), device="cuda")

    def step() -> None:
        loss, _ = F_itm.matching_loss(queries, contexts, attention=attention)
        torch.autograd.grad(loss, leaves, incoming)

    kinds = Counter(re.sub(r".*?(\w+)_kernel.*", r"\1", name).split()[0] for name in launched(step, names_on_device))
    ours = ("prepare_scores", "matching_loss", "scale_gradient", "list_pairs", "backpropagate_pairs")
    assert kinds == {"Memset": 2, **dict.fromkeys(ours, 1)}
