"""Open what the commands of indexes read: splits, folders of pictures, and the training data of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from itm_fast.data import PrecomputedDataset
    from itm_fast.search.members import Members


def source_of(members: Members, runs: list[Path], data: Path | None, split: str, pictures: Path | None) -> Any:
    """Return what an index is built from: a split of --data, or the folder --pictures."""
    if (data is None) == (pictures is None):
        raise ValueError("--data: expected either --data DIR or --pictures DIR")
    return str(pictures) if pictures is not None else split_of(members, runs, data, split)


def split_of(members: Members, runs: list[Path], data: Path | None, split: str) -> PrecomputedDataset:
    """Open a split of --data as the first model reads it."""
    from itm_fast.cli.models import dataset_of

    model = members.main
    if model.tokenizer is None:
        raise ValueError(f"{runs[0]}: expected the vocabulary of the training in this folder, found none")
    assert data is not None
    return dataset_of(data, split, model.tokenizer, model, runs[0])


def split_to_learn_from(members: Members, runs: list[Path], data: Path, split: str) -> PrecomputedDataset:
    """Open the split that a learned pooling is trained on: of --data, or else of the training data of the first run."""
    from itm_fast.data.store import check_data

    try:
        check_data(data, split)
    except ValueError as error:
        try:
            return training_data(members, runs[0], split)
        except ValueError as other:
            advice = "--pooling mean needs none, --training-split takes another"
            raise ValueError(f"{error}; {other}; {advice}") from None
    return split_of(members, runs, data, split)


def training_data(members: Members, run: Path, split: str) -> PrecomputedDataset:
    """Open a split of the data that the first model was trained on; ValueError if they are unknown or unreadable."""
    from itm_fast.cli.models import dataset_of
    from itm_fast.training import run_folder

    settings = run / run_folder.CONFIG
    if members.main.tokenizer is None or not settings.exists():
        missing = settings if members.main.tokenizer is not None else run / run_folder.VOCABULARY
        raise ValueError(f"{missing}: no such file, so the training data of {run} are unknown")
    data = run_folder.saved_config(run).data
    if data is None:
        raise ValueError(f"{settings}: data: expected the folder of the training data, found none")
    if not Path(data).exists():
        raise ValueError(f"{settings}: data: {data} does not exist; if it was moved, correct this entry")
    try:
        return dataset_of(Path(data), split, members.main.tokenizer, members.main, run)
    except (ValueError, OSError) as error:
        raise ValueError(f"{settings}: data: {error}") from None
