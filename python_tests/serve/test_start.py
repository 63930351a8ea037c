"""What the service loads at its start, so that no request waits for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from itm_fast.data import tokenization
from itm_fast.search import Index, encoders
from itm_fast.serve import create_app
from itm_fast.serve.metrics import Metrics
from itm_fast.serve.served import Served


def test_no_request_waits_for_a_package(encoder_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nltk.tokenize.destructive", raising=False)
    tokenization._word_tokenizer.cache_clear()
    encoders._loaded.cache_clear()
    create_app(encoder_index)
    assert "nltk.tokenize.destructive" in sys.modules
    assert encoders._loaded.cache_info().currsize == 1


def test_texts_are_answered_without_the_encoder(
    encoder_index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vit").rename(tmp_path / "moved")
    encoders._loaded.cache_clear()
    served = Served(encoder_index, None, "cpu", Metrics())
    Index.open(encoder_index).delete([served.index.items()[0].id])
    assert served.refresh()
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith(f"some queries cannot be answered: {tmp_path / 'vit'}")
    with TestClient(create_app(encoder_index), base_url="http://127.0.0.1") as client:
        assert len(client.get("/search?q=red+ball&k=3").json()["hits"]) == 3
