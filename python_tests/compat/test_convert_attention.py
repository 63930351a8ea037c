"""Official checkpoints of BFAN, PFAN and CHAN give the official scores."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from python_tests.helpers import official_scan
from python_tests.helpers.bert import PIECES, bert_states, random_bert
from python_tests.helpers.conversions import CAPTIONS, assert_warned, changed, converted, refused, token_ids
from python_tests.helpers.official_scan import WORDS, caption_states, l2norm, write_checkpoint, write_vocabulary
from python_tests.models.test_pfan import blocks_of, boxes_of

IDS = [token_ids(caption) for caption in CAPTIONS]
ABSENT = dict.fromkeys(("bi_gru", "raw_feature_norm", "agg_func", "cross_attn", "lambda_lse"))
BFAN = {**ABSENT, "lambda_softmax": 20.0, "focal_type": "equal"}
CHAN = {
    **dict.fromkeys((*ABSENT, "lambda_softmax")), "text_enc_type": "bigru", "wemb_type": "glove", "drop": True,
    "coding_type": "VHACoding", "alpha": 0.1, "pooling_type": "LSEPooling", "belta": 0.2, "optim": "adam",
    "precomp_enc_type": "selfattention", "vse_mean_warmup_epochs": 1, "criterion": "ContrastiveLoss", "seed": 2022,
    "word2idx": {"a": 1}, "vocab_size": len(WORDS) + 1, "obj_drop_rate": 0.2, "temperature": 0.01,
}  # fmt: skip


def options(source: str, **changes: object) -> argparse.Namespace:
    own = {"bfan": BFAN, "pfan": {}, "chan": CHAN}[source]
    return official_scan.options(**{**own, **changes})


def random_model(source: str, opt: argparse.Namespace) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the state dicts of an official model with random weights, image encoder first."""
    whole = argparse.Namespace(**{"bi_gru": True, **vars(opt)})
    image, text = official_scan.random_model(
        argparse.Namespace(**{**vars(whole), "precomp_enc_type": getattr(opt, "precomp_enc_type", "basic")})
    )
    random = torch.Generator().manual_seed(5)

    def tensor(*shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(*shape, generator=random)

    if source == "pfan":
        image["fc.weight"] = tensor(8, 6 + 3)
        image |= {"fc_att.weight": tensor(3, 6), "fc_att.bias": tensor(3), "position_embedding.weight": tensor(17, 3)}
    if source == "chan":
        text["embed.weight"] = tensor(len(WORDS) + 1, 5)
        text |= {"fc.weight": tensor(8, 8), "fc.bias": tensor(8)}
        if opt.precomp_enc_type == "selfattention":
            image |= {
                "feedforward.ln.weight": 1 + tensor(8), "feedforward.ln.bias": tensor(8),
                "feedforward.attn.in_proj_weight": tensor(24, 8), "feedforward.attn.in_proj_bias": tensor(24),
                "feedforward.attn.out_proj.weight": tensor(8, 8), "feedforward.attn.out_proj.bias": tensor(8),
            }  # fmt: skip
        return [image, text, OrderedDict(), OrderedDict()]
    return [image, text]


def features(source: str) -> np.ndarray:
    rows = np.random.default_rng(1).standard_normal((3, 4, 6)).astype(np.float32)
    return np.concatenate([rows, boxes_of(12).reshape(3, 4, 4)], axis=2) if source == "pfan" else rows


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows)
    return powers / powers.sum(axis=-1, keepdims=True)


def regions_of(image: dict[str, np.ndarray], opt: argparse.Namespace, rows: np.ndarray) -> np.ndarray:
    """Encode the regions of one image; those of PFAN end with their boxes."""
    if "fc.weight_v" in image:
        norm = np.sqrt((image["fc.weight_v"] ** 2).sum())
        image = {**image, "fc.weight": image["fc.weight_v"] * image["fc.weight_g"] / norm}
    if "fc_att.weight" in image:
        rows = np.stack([located(image, row[:6], row[6:]) for row in rows])
    embedded = rows @ image["fc.weight"].T + image["fc.bias"]
    if "feedforward.ln.weight" in image:
        embedded = embedded + attended(image, embedded)
    return embedded if opt.no_imgnorm else l2norm(embedded)


def located(image: dict[str, np.ndarray], row: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Append the position of a region of PFAN."""
    numbers, overlaps = zip(*blocks_of(box.tolist(), 4, 15), strict=True)
    vectors = image["position_embedding.weight"][list(numbers)]
    relevance = softmax(np.tanh(vectors @ (image["fc_att.weight"] @ row + image["fc_att.bias"])))
    return np.concatenate([row, softmax(np.array(overlaps) * relevance) @ vectors])


def attended(image: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Run CHAN's self-attention with 8 heads of one channel over the regions of an image."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    normed = normed * image["feedforward.ln.weight"] + image["feedforward.ln.bias"]
    projected = normed @ image["feedforward.attn.in_proj_weight"].T + image["feedforward.attn.in_proj_bias"]
    query, key, value = np.split(projected, 3, axis=1)
    mixed = np.stack([softmax(np.outer(query[:, h], key[:, h])) @ value[:, h] for h in range(8)], axis=1)
    return mixed @ image["feedforward.attn.out_proj.weight"].T + image["feedforward.attn.out_proj.bias"]


def attention(query: np.ndarray, context: np.ndarray, temperature: float) -> np.ndarray:
    raw = context @ query.T
    raw = l2norm(np.where(raw > 0, raw, 0.1 * raw))
    return softmax(temperature * raw.T)


def cosines(query: np.ndarray, other: np.ndarray) -> np.ndarray:
    norms = np.sqrt((query**2).sum(axis=1) * (other**2).sum(axis=1))
    return (query * other).sum(axis=1) / np.maximum(norms, 1e-8)


def focal(query: np.ndarray, context: np.ndarray, opt: argparse.Namespace) -> float:
    """Return BFAN's score of one direction."""
    weights = attention(query, context, opt.lambda_softmax)
    for row in weights:
        confidence = np.ones_like(row) if opt.focal_type == "equal" else np.sqrt(row)
        kept = [sum((row[i] - row[j]) * confidence[j] for j in range(len(row))) > 0 for i in range(len(row))]
        row *= kept
    return float(cosines(query, weights / weights.sum(axis=1, keepdims=True) @ context).mean())


def pair_score(source: str, opt: argparse.Namespace, regions: np.ndarray, words: np.ndarray) -> float:
    if source == "bfan":
        return focal(words, regions, opt) + focal(regions, words, opt)
    if source == "pfan":
        query, context = (words, regions) if opt.cross_attn == "t2i" else (regions, words)
        weights = attention(query, context, opt.lambda_softmax)
        peak = 0.5 * weights.max(axis=1).mean() if opt.cross_attn == "t2i" else 0.0
        return float(cosines(query, weights @ context).mean() + peak)
    best = (words @ regions.T).max(axis=1)
    if opt.pooling_type == "LSEPooling":
        # The official score, times the inverse temperature.
        return float(np.log(np.exp(best / opt.belta).sum()) * opt.belta)
    return float(getattr(np, opt.pooling_type.removesuffix("Pooling").lower())(best))


def official_scores(
    source: str, model: list[Any], opt: argparse.Namespace, states: list[np.ndarray] | None = None
) -> np.ndarray:
    """Compute the scores (n_images, n_captions) in float64, pair by pair; `states` are those of BERT."""
    image, text = ({name: weight.double().numpy() for name, weight in part.items()} for part in model[:2])
    if states is None:
        captions = caption_states(text, opt, IDS, "rnn", getattr(opt, "bi_gru", True))
    else:
        captions = [l2norm(one @ text["linear.weight"].T + text["linear.bias"]) for one in states]
    pictures = [regions_of(image, opt, rows.astype(np.float64)) for rows in features(source)]
    return np.array([[pair_score(source, opt, rows, words) for words in captions] for rows in pictures])


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp_vocab.json")


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("bfan", {}), ("bfan", {"focal_type": "prob", "num_layers": 2}), ("bfan", {"precomp_enc_type": "weight_norm"}),
        ("bfan", {"no_imgnorm": True, "lambda_softmax": 9.0}),
        ("pfan", {}), ("pfan", {"cross_attn": "i2t", "lambda_softmax": 4.0}), ("pfan", {"bi_gru": False}),
        ("chan", {}), ("chan", {"pooling_type": "MeanPooling", "precomp_enc_type": "basic"}),
        ("chan", {"pooling_type": "MaxPooling"}), ("chan", {"pooling_type": "SumPooling"}),
    ],
    ids=str,
)  # fmt: skip
def test_converted_models_give_the_official_scores(
    tmp_path: Path, vocab: Path, source: str, changes: dict[str, object]
) -> None:
    opt = options(source, **changes)
    model = random_model(source, opt)
    compat.convert(source, write_checkpoint(tmp_path / "model_best.pth.tar", model, opt), vocab, tmp_path / "run")
    expected = official_scores(source, model, opt)
    assert expected.std() > 0.02
    scale = max(1, np.abs(expected).max())
    np.testing.assert_allclose(converted(tmp_path / "run", features(source)), expected, rtol=0, atol=1e-5 * scale)


def test_a_chan_with_bert_gives_the_official_scores(tmp_path: Path) -> None:
    opt = options("chan", vocab_size=len(PIECES), text_enc_type="bert", precomp_enc_type="basic")
    image, *_ = random_model("chan", opt)
    bert, random = random_bert(), torch.Generator().manual_seed(9)
    text = OrderedDict({
        **{f"bert.{name}": weight for name, weight in bert.items()},
        "linear.weight": torch.randn(8, 24, generator=random), "linear.bias": torch.randn(8, generator=random),
    })  # fmt: skip
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    model = [image, text, OrderedDict(), OrderedDict()]
    compat.convert("chan", write_checkpoint(tmp_path / "c.pth", model, opt), path, tmp_path / "run", bert_heads=12)
    captions = ["red boat", "dog , boat", "red"]
    tokenizer = models.load(tmp_path / "run").tokenizer
    states = [bert_states(bert, tokenizer.encode(caption)) for caption in captions]
    expected = official_scores("chan", model, opt, states)
    np.testing.assert_allclose(converted(tmp_path / "run", features("chan"), captions), expected, rtol=0, atol=2e-5)


def test_what_does_not_fit(tmp_path: Path, vocab: Path) -> None:
    bfan, pfan, chan = (random_model(source, options(source)) for source in ("bfan", "pfan", "chan"))
    for source, model, opt, message in (
        ("bfan", bfan, options("bfan", focal_type="mean"), "opt.focal_type: expected one of equal, prob, got 'mean'"),
        ("bfan", pfan, options("bfan"), "model[0]['fc.weight']: expected shape (8, 6) from the options, got (8, 9)"),
        ("pfan", bfan, options("pfan"), "model[0]['fc.weight']: expected shape (8, 206) from the options, got (8, 6)"),
        ("pfan", pfan, options("pfan", agg_func="Max"), "opt.agg_func: expected one of Mean, got 'Max'"),
        ("chan", bfan, options("chan"),
         "expected 4 state dicts in 'model' (image encoder, text encoder, similarity, loss), got 2; is it the "
         "checkpoint of another model?"),
        ("chan", chan, options("chan", precomp_enc_type="transformer"),
         "opt.precomp_enc_type: expected one of basic, selfattention, got 'transformer'"),
        ("chan", chan, options("chan", no_imgnorm=True),
         "opt.no_imgnorm: expected false, as the similarity is a cosine here and an inner product there"),
        ("chan", chan, options("chan", belta=0.0), "opt.belta: expected a number above 0"),
        ("chan", [chan[0], changed(chan[1], embed__weight=torch.zeros(16, 5)), *chan[2:]], options("chan"),
         "model[1]['embed.weight']: 16 words, but the vocabulary has 17 with <mask>; pass the vocabulary that the "
         "model was trained with"),
    ):  # fmt: skip
        assert refused(tmp_path / f"{source}{len(message)}", source, model, opt, vocab) == message


@pytest.mark.parametrize("source", ["bfan", "pfan", "chan"])
def test_unknown_options_are_warned_of(tmp_path: Path, vocab: Path, source: str) -> None:
    assert_warned(tmp_path, source, random_model(source, options(source)), options(source, extra=1), vocab, "extra")
