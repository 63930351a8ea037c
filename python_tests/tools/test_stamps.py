"""The captions of Tux Paint's stamps, read by the importer of pictures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import stamps
from PIL import Image

from itm_fast.cli import run


def folder_of(tmp_path: Path, n: int) -> Path:
    """Write stamps whose sentences occur twice each, one without a sentence, and a sentence without a picture."""
    folder = tmp_path / "stamps"
    for number in range(n):
        path = folder / f"{'animals' if number % 2 else 'food'}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24 + number, 24), 60 + number).save(path)
        path.with_suffix(".txt").write_text(
            f"Drawing number {number // 2}, in “colour”.\nfr.utf8=Un dessin.\n", encoding="utf-8"
        )
    Image.effect_noise((24, 24), 20).save(folder / "food" / "mirror.png")
    (folder / "food" / "drawing.txt").write_text("A drawing as SVG only.\n", encoding="utf-8")
    return folder


def test_the_importer_reads_the_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = folder_of(tmp_path, 40), tmp_path / "stamps.csv"
    assert stamps.main(["--stamps", str(folder), "--out", str(out)]) == 0
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert {row["caption"] for row in rows} == {f"Drawing number {number}, in “colour”." for number in range(20)}
    by_sentence = {
        row["caption"]: {other["split"] for other in rows if other["caption"] == row["caption"]} for row in rows
    }
    assert all(len(splits) == 1 for splits in by_sentence.values())
    assert [sum(row["split"] == split for row in rows) for split in ("train", "dev", "test")] == [28, 4, 8]

    arguments = ["data", "import", "--images", folder, "--captions", out, "--skip-bad", "--min-count", 1]
    assert run([str(one) for one in (*arguments, "--out", tmp_path / "data")]) == 0
    printed = capsys.readouterr().out
    assert "train: 28 pictures, 28 captions" in printed
    assert "mirror.png: a picture without captions" in printed


def test_a_folder_without_stamps_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stamps.main(["--stamps", str(tmp_path), "--out", str(tmp_path / "stamps.csv")]) == 1
    assert capsys.readouterr().err == f"stamps: error: {tmp_path}: no stamps: PNG files with a text beside them\n"
    assert not (tmp_path / "stamps.csv").exists()
