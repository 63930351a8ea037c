"""Workloads of an index: build it, open it, and search it with one caption, beside scores of all images in PyTorch."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import models
from itm_fast.benchmarking.one_query import QUERIES
from itm_fast.benchmarking.workloads import REGIONS
from itm_fast.data import emoji
from itm_fast.fragments import Fragments
from itm_fast.search import Index
from itm_fast.search.members import Members

__all__ = ["SEARCHES", "IndexSizes", "accuracy", "make_build", "make_open", "make_search"]

_CHANNELS = 64
_RESULTS = 10
# Variants of a search: scores of all images in plain PyTorch, all items of an index, and its candidates.
SEARCHES = ("plain", "native exact", "native")


@dataclass(frozen=True)
class IndexSizes:
    """The size of an index: images of 36 regions, and the width of their embeddings."""

    images: int
    dim: int = 256


@functools.lru_cache(maxsize=1)
def _source(sizes: IndexSizes) -> tuple[Members, Tensor]:
    """Return SCAN with random weights, and random features (images, 36, 64)."""
    words = emoji.vocabulary()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.create("scan", vocab_size=len(words), feature_dim=_CHANNELS, embed_dim=sizes.dim)
        features = torch.randn(sizes.images, REGIONS, _CHANNELS)
    model.tokenizer = words
    return Members(model), features


@functools.lru_cache(maxsize=1)
def _built(sizes: IndexSizes) -> tuple[tempfile.TemporaryDirectory[str], Index]:
    place = tempfile.TemporaryDirectory()
    return place, _build(sizes, Path(place.name))


def _build(sizes: IndexSizes, place: Path) -> Index:
    members, features = _source(sizes)
    return Index.build(members, features, place / "index", pooling="mean", overwrite=True)


def _text() -> str:
    return emoji.captions("test")[0]


def make_search(variant: str, sizes: IndexSizes, small: bool = False) -> Callable[[], Any]:
    """Return a search with one caption for its ten best images."""
    sizes = IndexSizes(2 * _RESULTS, sizes.dim) if small else sizes
    members, features = _source(sizes)
    if variant != "plain":
        _, index = _built(sizes)
        return lambda: index.search(_text(), _RESULTS, exact=variant == "native exact")
    parts = [members.encode_images(part)[0] for part in features.split(256)]
    score = QUERIES["plain"](Fragments.cat(parts))

    @torch.no_grad()
    def run() -> Any:
        return score(members.encode_captions([_text()])[0]).topk(_RESULTS)

    return run


def make_build(_variant: str, sizes: IndexSizes, small: bool = False) -> Callable[[], Index]:
    """Return a call that encodes all images and writes an index."""
    sizes = IndexSizes(2 * _RESULTS, sizes.dim) if small else sizes
    _source(sizes)
    place = tempfile.TemporaryDirectory()
    return lambda: _build(sizes, Path(place.name))


def make_open(_variant: str, sizes: IndexSizes, small: bool = False) -> Callable[[], Index]:
    """Return a call that opens an index whose files are in the page cache."""
    _, index = _built(IndexSizes(2 * _RESULTS, sizes.dim) if small else sizes)
    return lambda: Index.open(index.path)


def accuracy(variant: str, sizes: IndexSizes) -> dict[str, float]:
    """Return the largest error of the ten best scores against float64; stored rows are rounded to bfloat16."""
    members, features = _source(sizes)
    words = members.encode_captions([_text()])[0].to(torch.float64)
    parts = [members.encode_images(part)[0].to(torch.float64) for part in features.split(256)]
    exact = torch.cat([F_itm.cross_attention_scores(words, part) for part in parts], 1)[0]
    found = make_search(variant, sizes)()
    if variant == "plain":
        scores, places = (one[0].tolist() for one in found)
    else:
        (hits,) = (one.hits for one in found)
        scores, places = [hit.score for hit in hits], [int(hit.item.id) for hit in hits]
    return {"max_score_error": max(abs(a - float(exact[b])) for a, b in zip(scores, places, strict=True))}
