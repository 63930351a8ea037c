"""Late interaction for the multi-vector encoder of sentence-transformers 6: similarity, scores of its losses, a loss.

Inside: `use_native_similarity`, `maxsim`, `maxsim_pairwise`, `colbert_scores`, `colbert_kd_scores`,
`MultiVectorMatchingLoss`. The package sentence-transformers is not imported.

On a CPU the kernels keep no product of all tokens. Source of the score: ColBERT (Khattab and Zaharia, SIGIR 2020),
Eq 3.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.losses import TripletLoss

__all__ = [
    "MultiVectorMatchingLoss",
    "colbert_kd_scores",
    "colbert_scores",
    "maxsim",
    "maxsim_pairwise",
    "use_native_similarity",
]

# The score of a document without tokens, as in sentence-transformers: below every real one.
EMPTY_DOCUMENT = -1e9


def maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Score queries with documents: the sum over the tokens of a query of the largest inner product in a document.

    Takes the arguments of `sentence_transformers.util.maxsim` and returns the same scores.

    Args:
        a: the queries: a list of `(tokens, d)`, padded `(n, tokens, d)`, or one query `(tokens, d)`; tensors or arrays.
            In padded queries without a mask, rows of zeros are padding.
        b: the documents, in the same forms.
        a_mask: `(n, tokens)`, non-zero for the tokens that count; for a list, a list of masks of each length.
        b_mask: the same for the documents.
        chunk_elements: has no effect, since nothing is padded.
        length_normalize: divide by the number of tokens of the query ("meanmaxsim").
        device: where to compute; default: the device of the documents.

    Returns:
        `(n_queries, n_documents)` float32 (float64 for float64 embeddings) on the device of the documents. A query
        without tokens scores 0, a document without tokens -1e9 (before the division).

    Raises:
        ValueError: a shape does not fit.
    """
    return _scores(a, b, a_mask, b_mask, None, length_normalize, device)


def maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Score query i with document i: `(n,)`. Arguments and errors as in `maxsim`."""

    def diagonal(n: int, m: int) -> Tensor:
        if n != m:
            raise ValueError(f"a, b: expected as many queries as documents, got {n} and {m}")
        return torch.arange(n)[:, None].expand(n, 2)

    return _scores(a, b, a_mask, b_mask, diagonal, length_normalize, device)


def colbert_scores(
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score queries with all documents of a batch: the `similarity_fct` of losses with negatives in the batch.

    Args:
        queries_embeddings: `(q, tokens, d)`.
        documents_embeddings: `(p, n, tokens, d)`, n documents for each of p queries.
        queries_mask: `(q, tokens)`, non-zero for the tokens that count.
        documents_mask: `(p, n, tokens)`.
        chunk_elements: as in `maxsim`.
        length_normalize: as in `maxsim`.

    Returns:
        `(q, p * n)` float32 (float64 for float64 embeddings), with the documents of a query side by side.

    Raises:
        ValueError: a shape does not fit.
    """
    documents, mask = _grouped(documents_embeddings, documents_mask)
    return maxsim(queries_embeddings, documents, queries_mask, mask, length_normalize=length_normalize)


def colbert_kd_scores(
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score each query with its own documents: `(p, n)`, the `similarity_fct` of distillation losses.

    Arguments and errors as in `colbert_scores`, with as many queries as groups of documents.
    """
    documents, mask = _grouped(documents_embeddings, documents_mask)
    group = documents_embeddings.shape[1]

    def own(n: int, m: int) -> Tensor:
        if n * group != m:
            raise ValueError(f"documents_embeddings: expected {n} groups, as many as queries, got {m // group}")
        return torch.stack([torch.arange(m) // group, torch.arange(m)], 1)

    scores = _scores(queries_embeddings, documents, queries_mask, mask, own, length_normalize, None)
    return scores.view(-1, group)


def use_native_similarity(model: Any) -> Any:
    """Let `similarity` and `similarity_pairwise` of a `MultiVectorEncoder` use the kernels of itm_fast.

    Evaluators and applications that call these methods then use them, too. `similarity_fn_name` keeps its meaning.

    Args:
        model: the encoder. It is changed.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no multi-vector encoder.
    """
    if not hasattr(model, "similarity_pairwise") or "maxsim" not in str(getattr(model, "similarity_fn_name", "")):
        raise TypeError(f"model: expected a MultiVectorEncoder of sentence-transformers 6, got {shown(model)}")
    model.similarity = types.MethodType(_similarity, model)
    model.similarity_pairwise = types.MethodType(_similarity_pairwise, model)
    return model


class MultiVectorMatchingLoss(nn.Module):
    """Train a `MultiVectorEncoder` by a loss of itm_fast on the scores of a batch, such as hardest negatives.

    The other captions, or documents, of the batch are the negatives, in both directions.

    Args:
        model: the encoder.
        loss: takes scores `(B, B)` with matching pairs on the diagonal. Default: `TripletLoss()`, with hardest
            negatives.
        length_normalize: divide by the number of tokens of the query, so that margins do not depend on it.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Tensor], Tensor] | None = None, *, length_normalize: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = TripletLoss() if loss is None else loss
        self.length_normalize = length_normalize

    def forward(self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of two columns, queries and documents, as the trainer of the encoder passes them.

        Raises:
            ValueError: there are not two columns.
        """
        columns = [dict(features) for features in sentence_features]
        if len(columns) != 2:
            raise ValueError(f"sentence_features: expected two columns, query and document, got {len(columns)}")
        encoded = [
            self.model(features, task=features.get("task", task))
            for features, task in zip(columns, ("query", "document"), strict=True)
        ]
        queries, documents = (one["token_embeddings"] for one in encoded)
        of_queries, of_documents = (one["attention_mask"] for one in encoded)
        scores = maxsim(queries, documents, of_queries, of_documents, length_normalize=self.length_normalize)
        return self.loss(scores)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings for the model card of sentence-transformers."""
        return {"loss": type(self.loss).__name__, "length_normalize": self.length_normalize}


def _similarity(model: Any, embeddings1: Any, embeddings2: Any, **options: Any) -> Tensor:
    return maxsim(embeddings1, embeddings2, **{"length_normalize": _by_mean(model), **options})


def _similarity_pairwise(model: Any, embeddings1: Any, embeddings2: Any, **options: Any) -> Tensor:
    return maxsim_pairwise(embeddings1, embeddings2, **{"length_normalize": _by_mean(model), **options})


def _by_mean(model: Any) -> bool:
    return bool(model.similarity_fn_name == "meanmaxsim")


def _grouped(documents: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if documents.ndim != 4:
        raise ValueError(f"documents_embeddings: expected shape (p, n, tokens, d), got {tuple(documents.shape)}")
    return documents.flatten(0, 1), None if mask is None else mask.flatten(0, 1)


def _scores(
    a: Any,
    b: Any,
    a_mask: Any,
    b_mask: Any,
    pairs: Callable[[int, int], Tensor] | None,
    by_mean: bool,
    device: str | torch.device | None,
) -> Tensor:
    queries, documents = _fragments("a", a, a_mask), _fragments("b", b, b_mask)
    result_device = documents.device
    where = result_device if device is None else torch.device(device)
    dtype = torch.promote_types(queries.dtype, documents.dtype)
    queries, documents = queries.to(where, dtype), documents.to(where, dtype)
    chosen = None if pairs is None else pairs(len(queries), len(documents)).to(where)
    if not len(queries) or not len(documents):
        return queries.values.new_zeros(0 if chosen is not None else (len(queries), len(documents))).to(result_device)
    scores = F_itm.maxsim_scores(queries, documents, pairs=chosen)
    empty = documents.lengths == 0
    scores = scores.masked_fill(empty if chosen is None else empty[chosen[:, 1]], EMPTY_DOCUMENT)
    if by_mean:
        tokens = queries.lengths.clamp(min=1)
        scores = scores / (tokens[:, None] if chosen is None else tokens[chosen[:, 0]])
    return scores.to(result_device)


def _fragments(name: str, sets: Any, mask: Any) -> Fragments:
    """Pack one side of a score."""
    if isinstance(sets, list | tuple):
        tensors = [_float(torch.as_tensor(one)) for one in sets]
        if mask is not None:
            lengths = [len(one) for one in mask]
            if lengths != [len(one) for one in tensors]:
                raise ValueError(f"{name}_mask: expected one mask of each length, got masks of {shown(lengths)}")
            tensors = [one[torch.as_tensor(own) != 0] for one, own in zip(tensors, mask, strict=True)]
        return Fragments.from_list(tensors) if tensors else Fragments(torch.zeros(0, 1), torch.zeros(1).long())
    padded = _float(torch.from_numpy(sets) if isinstance(sets, np.ndarray) else sets)
    chosen = None if mask is None else torch.as_tensor(np.stack(mask) if isinstance(mask, list) else mask) != 0
    if padded.ndim == 2:
        padded, chosen = padded[None], chosen if chosen is None else chosen.reshape(1, -1)
    if padded.ndim != 3:
        raise ValueError(f"{name}: expected shape (n, tokens, d), got {tuple(padded.shape)}")
    if chosen is None:
        chosen = (padded != 0).any(2)
    if chosen.shape != padded.shape[:2]:
        raise ValueError(f"{name}_mask: expected shape {tuple(padded.shape[:2])}, got {tuple(chosen.shape)}")
    return Fragments.from_padded(padded, mask=chosen.to(padded.device))


def _float(tensor: Tensor) -> Tensor:
    """Return quantized embeddings, which are integers, as float32."""
    return tensor if tensor.is_floating_point() else tensor.float()
