"""Scores in a temporary file: the measures of the whole matrix, without a block of its size in memory."""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from itm_fast.evaluation.score_sources import MatrixScores
from itm_fast.evaluation.score_truth import score_truth
from itm_fast.evaluation.stored_scores import scores_on_disk
from python_tests.evaluation.test_evaluation import Gallery, TableModel
from python_tests.evaluation.test_score_truth import IDS, OWNERS, class_file, table, truth_of, write_ratings

SIZES = {"tile_images": 2, "tile_captions": 5, "chunk_captions": 20}


class Largest(TorchDispatchMode):
    """Keep the largest number of elements that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [one for one in (found if isinstance(found, tuple | list) else [found]) if isinstance(one, Tensor)]
        self.elements = max([self.elements, *(one.numel() for one in tensors)])
        return found


@pytest.mark.filterwarnings("ignore:protocol cxc. a score matrix has no scores for")
@pytest.mark.parametrize("protocol", ["eccv", "cxc", "pmrp", "pmrp of classes"])
def test_a_protocol_needs_only_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    for limit, scores in (("_BLOCK", 150), ("_RANKED", 60)):
        monkeypatch.setattr(f"itm_fast.evaluation.many_positives.{limit}", scores)
    for kind in ("eccv", "pm"):
        truth_of(kind, tmp_path)
    write_ratings(tmp_path, "sits")
    if protocol == "pmrp of classes":
        class_file(tmp_path)
    name = protocol.split()[0]
    tables = torch.from_numpy(table()), torch.from_numpy(table()).flip(0)
    members = [(TableModel(one), Gallery(OWNERS.tolist(), len(one))) for one in tables]
    with Largest() as largest, scores_on_disk(members, **SIZES) as source:
        assert source is not None
        found = score_truth(name, source, OWNERS, tmp_path, IDS, samples=5)
    assert largest.elements <= tables[0].numel() / 2
    assert all(sum(rows * columns for rows, columns in model.tiles) == tables[0].numel() for model, _ in members)
    monkeypatch.undo()
    whole = MatrixScores(tables[0] + tables[1])
    with Largest() as largest:
        assert score_truth(name, whole, OWNERS, tmp_path, IDS, samples=5).summary == found.summary
        _ = whole.tile(torch.arange(10), torch.arange(50)) + 0
    assert largest.elements == tables[0].numel(), "the whole matrix would be seen"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_keep_their_precision(dtype: torch.dtype) -> None:
    scores = torch.from_numpy(table()).to(dtype)
    with scores_on_disk([(TableModel(scores), Gallery(OWNERS.tolist(), 10))], **SIZES) as source:
        assert source is not None
        assert torch.equal(source.tile(torch.arange(10), torch.arange(50)).double(), scores.double())


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    message = (
        f"{tempfile.gettempdir()}: cannot keep 4,000 bytes of scores: No space left on device; set TMPDIR to a folder "
        "with more space, or leave out --streaming"
    )
    opened = scores_on_disk([(TableModel(torch.from_numpy(table())), Gallery(OWNERS.tolist(), 10))])
    with pytest.raises(OSError, match=f"^{re.escape(message)}$"), opened:
        pass
