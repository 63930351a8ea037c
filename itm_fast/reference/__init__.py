"""Every operator in plain PyTorch: obvious, differentiable, float64-capable.

The truth of the tests, the baseline of the benchmarks, and what serves where no native kernel does.
"""

from itm_fast.reference.cross_attention import (
    cross_attention_scores,
    cross_attention_scores_packed,
    cross_attention_weights,
)
from itm_fast.reference.retrieval import recall_summary, retrieval_ranks
from itm_fast.reference.triplet_loss import hardest_negatives, triplet_loss

__all__ = [
    "cross_attention_scores",
    "cross_attention_scores_packed",
    "cross_attention_weights",
    "hardest_negatives",
    "recall_summary",
    "retrieval_ranks",
    "triplet_loss",
]
