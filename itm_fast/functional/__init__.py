"""The public functions: stateless, differentiable, with documented shapes."""

from itm_fast.functional.boosting_loss import boosting_loss
from itm_fast.functional.cross_attention import PreparedContexts, cross_attention_scores, prepare
from itm_fast.functional.domain_regularization import domain_regularization
from itm_fast.functional.gradient_sparse import gradient_sparse_scores
from itm_fast.functional.matching_loss import matching_loss
from itm_fast.functional.maxsim import maxsim_scores
from itm_fast.functional.regulators import RegulatorParameters, cross_attention_alignments, regulated_scores
from itm_fast.functional.retrieval import recall_summary, retrieval_ranks
from itm_fast.functional.triplet_loss import hardest_negatives, triplet_loss

__all__ = [
    "PreparedContexts",
    "RegulatorParameters",
    "boosting_loss",
    "cross_attention_alignments",
    "cross_attention_scores",
    "domain_regularization",
    "gradient_sparse_scores",
    "hardest_negatives",
    "matching_loss",
    "maxsim_scores",
    "prepare",
    "recall_summary",
    "regulated_scores",
    "retrieval_ranks",
    "triplet_loss",
]
