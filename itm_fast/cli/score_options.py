"""The options of `itm-fast score`.

Inside: `TruthOptions`, `ScoreOptions`, `check_used`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

__all__ = ["ScoreOptions", "TruthOptions", "check_used"]


def check_used(given: Mapping[str, object], needed: str) -> None:
    """Raise ValueError if one of the options has a value; `needed` is what all of them need and was not given."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option}: has no effect without {needed}")


@attrs.frozen
class TruthOptions:
    """Files that name more positives than the captions of an image, and the numbers that they use."""

    ground_truth: Path | None
    image_ids: Path | None
    caption_ids: Path | None

    def check(self, protocols: Sequence[str]) -> None:
        """Raise ValueError if one of the protocols needs the files, but lacks one, or if none needs those given."""
        from itm_fast.evaluation.standards import PROTOCOLS

        given = {
            "--ground-truth": self.ground_truth, "--image-ids": self.image_ids, "--caption-ids": self.caption_ids,
        }  # fmt: skip
        if any(PROTOCOLS[name].truth for name in protocols):
            self.paths()
        else:
            check_used(given, "--protocol eccv, cxc or pmrp")

    def paths(self) -> tuple[Path, Path, Path]:
        """Return all three; raise ValueError if one was not given."""
        if self.ground_truth is None or self.image_ids is None or self.caption_ids is None:
            raise ValueError(
                "--protocol: eccv, cxc and pmrp need --ground-truth DIR, the folder of their files, and --image-ids "
                "FILE and --caption-ids FILE, the COCO number of each image and caption"
            )
        return self.ground_truth, self.image_ids, self.caption_ids


@attrs.frozen
class ScoreOptions:
    """The options of the command, as it describes them."""

    scores: Path | None
    image_embeddings: Path | None
    caption_embeddings: Path | None
    similarity: str
    key: str | None
    image_key: str | None
    caption_key: str | None
    captions_first: bool
    distances: bool
    caption_image: Path | None
    protocols: list[str]
    folds: int | None
    truth: TruthOptions
    ties: str
    bootstrap: int
    against: Path | None
    against_key: str | None
    permutations: int
    seed: int
    data: Path | None
    split: str
    report: Path | None
    rankings: Path | None
    top: int
    json_file: Path | None
    threads: int
