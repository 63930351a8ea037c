"""The scores of sentence-transformers' multi-vector encoder, its own against those of itm_fast."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorDistillKLDivLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.util import similarity

from itm_fast.adapters import sentence_transformers as native
from itm_fast.losses import TripletLoss
from python_tests.helpers.bert import WORDS, write_bert
from python_tests.helpers.fragments import native_calls

QUERIES = ["a red ball", "the dog", "tree"]
DOCUMENTS = ["a ball and a red car", "a dog", "the tree and the sun", "boat"]
EXACT = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> MultiVectorEncoder:
    folder = write_bert(tmp_path_factory.mktemp("encoder") / "bert")
    torch.manual_seed(0)
    return MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)


def embedded(encoder: MultiVectorEncoder) -> tuple[Any, Any]:
    return encoder.encode_query(QUERIES), encoder.encode_document(DOCUMENTS)


@pytest.mark.parametrize("name", ["maxsim", "meanmaxsim"])
def test_similarities_of_an_encoder(encoder: MultiVectorEncoder, name: str) -> None:
    encoder = copy.deepcopy(encoder)
    encoder.similarity_fn_name = name
    queries, documents = embedded(encoder)
    assert len({len(one) for one in documents}) > 1
    wanted = encoder.similarity(queries, documents)
    pairs = encoder.similarity_pairwise(queries, documents[:3])
    assert native.use_native_similarity(encoder) is encoder
    with native_calls() as called:
        torch.testing.assert_close(encoder.similarity(queries, documents), wanted, **EXACT)
    assert "maxsim_scores" in [name for name, _ in called]
    torch.testing.assert_close(encoder.similarity_pairwise(queries, documents[:3]), pairs, **EXACT)
    torch.testing.assert_close(pairs, wanted.diagonal(), **EXACT)


@pytest.mark.parametrize("length_normalize", [False, True])
def test_all_forms_of_embeddings(length_normalize: bool) -> None:
    random = torch.Generator().manual_seed(1)
    lists = [[torch.randn(n, 6, generator=random) for n in sizes] for sizes in ((3, 1, 5), (4, 7))]
    padded = [torch.nn.utils.rnn.pad_sequence(one, batch_first=True) for one in lists]
    masks = [torch.rand(one.shape[:2], generator=random) < 0.7 for one in padded]
    masks[1][1] = False  # A document without tokens.
    options = {"length_normalize": length_normalize}
    forms: list[tuple[Any, Any, dict[str, Any]]] = [
        (*lists, {}),
        (*padded, {}),
        (padded[0].numpy(), padded[1].numpy(), {}),
        (*padded, {"a_mask": masks[0], "b_mask": masks[1]}),
        (lists[0][0], lists[1], {}),
        ([(8 * one).to(torch.int8) for one in lists[0]], [np.asarray(8 * one).astype(np.int8) for one in lists[1]], {}),
        (padded[0].bfloat16(), padded[1].bfloat16(), {}),
    ]
    for a, b, more in forms:
        wanted = similarity.maxsim(a, b, **more, **options)
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if getattr(a, "dtype", None) == torch.bfloat16 else EXACT
        torch.testing.assert_close(native.maxsim(a, b, **more, **options), wanted, **tolerance)
    assert native.maxsim([], lists[1]).shape == similarity.maxsim([], lists[1]).shape == (0, 2)
    with pytest.raises(ValueError, match=r"b_mask: expected shape \(2, 7\), got \(3, 5\)"):
        native.maxsim(*padded, b_mask=masks[0])
    with pytest.raises(ValueError, match="expected as many queries as documents, got 3 and 2"):
        native.maxsim_pairwise(*lists)


def features(encoder: MultiVectorEncoder, groups: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(2)
    texts = [[" ".join(random.choice(WORDS, size)) for size in random.integers(2, 7, 4)] for _ in range(1 + groups)]
    return [encoder.preprocess(one) if hasattr(encoder, "preprocess") else encoder.tokenize(one) for one in texts]


def gradients(loss: torch.nn.Module, encoder: MultiVectorEncoder, *arguments: Any) -> tuple[torch.Tensor, ...]:
    value = loss(*arguments)
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    return value.detach(), *(one for one in torch.autograd.grad(value, weights, allow_unused=True) if one is not None)


def test_losses_of_the_package_with_native_scores(encoder: MultiVectorEncoder) -> None:
    encoder.eval()
    inputs = features(encoder, 2)
    wanted = gradients(MultiVectorMultipleNegativesRankingLoss(encoder), encoder, inputs)
    found = gradients(
        MultiVectorMultipleNegativesRankingLoss(encoder, similarity_fct=native.colbert_scores), encoder, inputs
    )
    assert len(wanted) == len(found) > 10
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    teacher = torch.randn(4, 2, generator=torch.Generator().manual_seed(3))
    wanted = gradients(MultiVectorDistillKLDivLoss(encoder), encoder, inputs, teacher)
    kd = MultiVectorDistillKLDivLoss(encoder, similarity_fct=native.colbert_kd_scores)
    torch.testing.assert_close(gradients(kd, encoder, inputs, teacher), wanted, rtol=1e-4, atol=1e-5)


def test_the_matching_loss_is_that_of_plain_scores(encoder: MultiVectorEncoder) -> None:
    encoder.eval()
    inputs = features(encoder, 1)

    def plain(columns: list[dict[str, Any]]) -> torch.Tensor:
        queries, documents = (
            encoder(dict(one), task=task) for one, task in zip(columns, ("query", "document"), strict=True)
        )
        scores = scoring.mean_colbert_scores(
            queries["token_embeddings"], documents["token_embeddings"][:, None],
            queries["attention_mask"].bool(), documents["attention_mask"].bool()[:, None],
        )  # fmt: skip
        positive = scores.diagonal()
        hinge = (0.2 + scores - positive[:, None]).clamp(min=0), (0.2 + scores - positive).clamp(min=0)
        off = ~torch.eye(len(scores), dtype=torch.bool)
        return sum((one * off).max(axis).values.sum() for one, axis in zip(hinge, (1, 0), strict=True))

    loss = native.MultiVectorMatchingLoss(encoder, TripletLoss(margin=0.2, mining="hardest"))
    found, wanted = gradients(loss, encoder, inputs), gradients(plain, encoder, inputs)
    assert wanted[0] > 0
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="expected two columns, query and document, got 3"):
        loss(features(encoder, 2))
    with pytest.raises(TypeError, match="expected a MultiVectorEncoder"):
        native.use_native_similarity(torch.nn.Linear(1, 1))
