"""Reference implementation of every operator in plain PyTorch. It is differentiable and supports float64.

Tests and benchmarks compare against it, and it runs where no native kernel is available.
"""

from itm_fast.reference.boosting_loss import boosting_loss
from itm_fast.reference.cross_attention import (
    cross_attention_scores,
    cross_attention_scores_packed,
    cross_attention_weights,
)
from itm_fast.reference.domain_regularization import domain_regularization, domain_regularization_packed
from itm_fast.reference.matching_loss import matching_loss
from itm_fast.reference.maxsim import maxsim_scores, maxsim_scores_packed
from itm_fast.reference.regulators import (
    RegulationSteps,
    cross_attention_alignments,
    regulated_scores,
    regulation_steps,
)
from itm_fast.reference.regulators_packed import cross_attention_alignments_packed, regulated_scores_packed
from itm_fast.reference.retrieval import recall_summary, retrieval_ranks
from itm_fast.reference.triplet_loss import hardest_negatives, triplet_loss

__all__ = [
    "RegulationSteps",
    "boosting_loss",
    "cross_attention_alignments",
    "cross_attention_alignments_packed",
    "cross_attention_scores",
    "cross_attention_scores_packed",
    "cross_attention_weights",
    "domain_regularization",
    "domain_regularization_packed",
    "hardest_negatives",
    "matching_loss",
    "maxsim_scores",
    "maxsim_scores_packed",
    "recall_summary",
    "regulated_scores",
    "regulated_scores_packed",
    "regulation_steps",
    "retrieval_ranks",
    "triplet_loss",
]
