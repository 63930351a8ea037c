"""What answers say about words and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from itm_fast import models
from itm_fast.data import BertVocabulary, CaptionDataset, TokenizerVocabulary, emoji
from itm_fast.search import Index
from itm_fast.serve import create_app
from python_tests.helpers.bert import PIECES
from python_tests.helpers.emoji_index import emoji_model


@pytest.mark.parametrize("kind", ["bert", "tokenizer"])
def test_unknown_words_of_a_tokenizer_are_named(tmp_path: Path, kind: str) -> None:
    pieces = BertVocabulary(PIECES)
    words = pieces if kind == "bert" else TokenizerVocabulary(json.loads(pieces._tokenizer.to_str()))
    torch.manual_seed(0)
    model = models.create("scan", vocab_size=len(words), feature_dim=8, embed_dim=16, word_dim=12).eval()
    model.tokenizer = words
    model.save(tmp_path / "run")
    index = Index.build(tmp_path / "run", torch.randn(3, 4, 8), tmp_path / "index").path
    with TestClient(create_app(index), base_url="http://127.0.0.1") as client:
        answer = client.get("/search", params={"q": "red Fish, ball xyzzy fish"}).json()
        assert answer["unknown"] == ["Fish", "xyzzy", "fish"]
        assert client.get("/search?q=red").json()["unknown"] == []
        answer = client.get("/explain", params={"q": " red  fish", "image": "0"}).json()
    assert answer["words"] == ["[CLS]", "red", "fish", "[SEP]"]
    assert answer["known"] == [True, True, False, True]
    assert answer["special"] == [True, False, False, True]


def test_a_picture_that_no_address_names_is_not_offered(tmp_path: Path) -> None:
    names = ["a b/ü.png", "two\nlines.png", "end.png\n", "x\udce9.png"]
    features = emoji.patches(emoji.pictures("test")[:4])
    captions = emoji.captions("test")[:20]
    dataset = CaptionDataset(features, captions, np.arange(20) // 5, emoji.vocabulary(), image_ids=names)
    emoji_model().save(tmp_path / "run")
    index = Index.build(tmp_path / "run", dataset, tmp_path / "index", pooling="mean").path
    with TestClient(create_app(index), base_url="http://127.0.0.1") as client:
        hits = client.get("/search?q=face&k=4").json()["hits"]
        pictures = {hit["id"]: hit["picture"] for hit in hits}
        assert pictures == {names[0]: True, "two\nlines.png": False, "end.png\n": False, "x\ufffd.png": False}
        for name, offered in pictures.items():
            assert client.get(f"/pictures/{quote(name, safe='')}").status_code == (200 if offered else 404)
