"""FDF's cross-model realignment on the bundled data: what it is measured with, and its table.

Inside: `SETTINGS`, `run`, `markdown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from itm_fast import build_info, models
from itm_fast.benchmarking.run import environment
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji
from itm_fast.report.features import write_features
from itm_fast.training import TrainConfig, run_folder, train
from itm_fast.training.cross_model import cross_table, pooled_features, realign

__all__ = ["SETTINGS", "markdown", "run"]

FORMAT_VERSION = 1
# A model whose both sides have an extractor and heads; all negatives, as the hardest ones do not train so briefly.
SETTINGS: dict[str, Any] = {
    "model": "vse_infty",
    "model_options": {"image_encoder": "patches", "embed_dim": 128, "word_dim": 64},
    "epochs": 4,
    "batch_size": 128,
    "drop_last": True,
    "lr": 1e-3,
    "lr_schedule": "cosine",
    "mining": "all",
}


def run(
    out: Path,
    *,
    threads: int = 1,
    figure: Path | None = None,
    settings: Mapping[str, Any] = SETTINGS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Trains two models that differ in their seed, realigns them in `out`, and compares all three on "test"."""
    data, runs = str(emoji.write_dataset(out / "data")), {}
    for seed, name in enumerate(("model 1", "model 2")):
        progress(f"{name}, seed {seed}")
        runs[name] = out / f"seed{seed}"
        train(TrainConfig(data=data, out=str(runs[name]), seed=seed, threads=threads, **settings), progress=False)
    progress("realignment")
    first, second = map(str, runs.values())
    runs["realigned"] = out / "realigned"
    realign(first, second, str(runs["realigned"]), data=data, progress=False, threads=threads)
    members = {name: models.load(folder) for name, folder in runs.items()}
    test = PrecomputedDataset(data, "test", Vocabulary.from_file(runs["realigned"] / run_folder.VOCABULARY))
    if figure is not None:
        write_features(figure, pooled_features(members, test))
    return {
        "format_version": FORMAT_VERSION,
        "environment": {
            **environment(torch.get_num_threads(), build_info()),
            "command": f"python benchmarks/realignment.py --threads {threads}",
        },
        "settings": dict(settings),
        "images": test.n_images,
        "rsum": cross_table(members, test),
    }


def markdown(results: Mapping[str, Any]) -> str:
    """The cross table, rows for the model of the images and columns for that of the captions."""
    table, where = results["rsum"], results["environment"]
    head = [f"| | {' | '.join(f'captions of {name}' for name in table)} |", f"| --- |{' ---: |' * len(table)}"]
    rows = [
        f"| images of {name} | {' | '.join(f'{value:.1f}' for value in row.values())} |" for name, row in table.items()
    ]
    said = (
        f"Sum of the six recalls on the {results['images']} images of test, of 600. `{where['command']}` on "
        f"{where['processor']}, {where['date'][:10]}, at {(where['commit'] or 'no commit')[:12]}."
    )
    return "\n".join([*head, *rows]) + f"\n\n{said}\n"
