"""Retrieval evaluation: scores in tiles, ranks without sorting, the field's protocols, recall tables.

`word_attention` returns the attention of words over regions, `explain` all intermediate results of one pair.
"""

from itm_fast.evaluation.attention import word_attention
from itm_fast.evaluation.distance import MeanDistance
from itm_fast.evaluation.explanation import Explanation, explain
from itm_fast.evaluation.protocols import evaluate, evaluate_ensemble, evaluate_scores
from itm_fast.evaluation.reranking import rerank
from itm_fast.evaluation.scoring import Gallery, Scorer, score_matrix
from itm_fast.evaluation.streaming import stream_ranks, top_k
from itm_fast.evaluation.table import recall_table

__all__ = [
    "Explanation",
    "Gallery",
    "MeanDistance",
    "Scorer",
    "evaluate",
    "evaluate_ensemble",
    "evaluate_scores",
    "explain",
    "recall_table",
    "rerank",
    "score_matrix",
    "stream_ranks",
    "top_k",
    "word_attention",
]
