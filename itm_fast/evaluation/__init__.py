"""Retrieval evaluation: scores in tiles, ranks without sorting, the field's protocols, recall tables.

`open_matrix`, `open_embeddings` and `score_protocol` evaluate scores of any repository; `intervals` and `compare` give
the uncertainty of their measures. `word_attention` returns the attention of words over regions, `explain` all
intermediate results of one pair, `speech_statistics` attention by part of speech.
"""

from itm_fast.evaluation.attention import word_attention
from itm_fast.evaluation.bootstrap import Comparison, compare, intervals
from itm_fast.evaluation.distance import MeanDistance
from itm_fast.evaluation.explanation import Explanation, explain, explain_encoded
from itm_fast.evaluation.measures import Measures
from itm_fast.evaluation.metric import RetrievalRecall
from itm_fast.evaluation.opening import Opened, open_embeddings, open_matrix
from itm_fast.evaluation.protocols import evaluate, evaluate_ensemble, evaluate_scores
from itm_fast.evaluation.reranking import rerank
from itm_fast.evaluation.score_protocols import Scored, score_protocol
from itm_fast.evaluation.score_sources import EmbeddingScores, MatrixScores, ScoreSource
from itm_fast.evaluation.scoring import Gallery, Scorer, score_matrix
from itm_fast.evaluation.speech import SpeechStatistics, speech_statistics, wasserstein_distance
from itm_fast.evaluation.streaming import stream_ranks, top_k
from itm_fast.evaluation.table import measure_table, recall_table

__all__ = [
    "Comparison",
    "EmbeddingScores",
    "Explanation",
    "Gallery",
    "MatrixScores",
    "MeanDistance",
    "Measures",
    "Opened",
    "RetrievalRecall",
    "ScoreSource",
    "Scored",
    "Scorer",
    "SpeechStatistics",
    "compare",
    "evaluate",
    "evaluate_ensemble",
    "evaluate_scores",
    "explain",
    "explain_encoded",
    "intervals",
    "measure_table",
    "open_embeddings",
    "open_matrix",
    "recall_table",
    "rerank",
    "score_matrix",
    "score_protocol",
    "speech_statistics",
    "stream_ranks",
    "top_k",
    "wasserstein_distance",
    "word_attention",
]
