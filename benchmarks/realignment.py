"""FDF's cross-model realignment on the bundled data: the measurement, its table and its figure.

There are two hosts. One reads captions with a GRU whose pooled states are its features, so captions have no head. The
other has a small BERT with a head. Both of its trainings start from the same random BERT weights, as the paper's start
from one pretrained BERT.

Inside: `HOSTS`, `run`, `markdown`, `draw`, `source`.

python -m benchmarks.realignment --json benchmarks/results/realignment.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.figures import sign, source_line
from benchmarks.units import commit_of
from itm_fast import build_info, models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji
from itm_fast.files import atomic
from itm_fast.files.environment import environment
from itm_fast.report.features import check_tsne, draw_planes, in_planes, pooled_features
from itm_fast.training import TrainConfig, TrainResult, run_folder, train
from itm_fast.training.fdf.cross_model import cross_table, realign

__all__ = ["HOSTS", "draw", "markdown", "run", "source"]

FORMAT_VERSION = 2
# All negatives: with the hardest ones, such short runs do not learn.
_SHARED: dict[str, Any] = {
    "model": "vse_infty", "epochs": 4, "batch_size": 128, "drop_last": True, "lr_schedule": "cosine", "mining": "all",
}  # fmt: skip
HOSTS: Mapping[str, dict[str, Any]] = {
    "GRU": {**_SHARED, "lr": 1e-3, "model_options": {"image_encoder": "patches", "embed_dim": 128, "word_dim": 64}},
    "BERT": {**_SHARED, "lr": 5e-4, "model_options": {"embed_dim": 128}, "bert": "a small one"},
}
_BERT: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 64,
}  # fmt: skip


def run(
    out: Path,
    *,
    threads: int = 1,
    hosts: Mapping[str, Mapping[str, Any]] = HOSTS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """For each host, train two models that differ in their seed, realign them in `out`, and compare all three.

    Features of the last host are placed in planes by t-SNE.
    """
    check_tsne()
    data = str(emoji.write_dataset(out / "data"))
    tables = {}
    for host, settings in hosts.items():
        bert = {"bert": str(_random_bert(out / "bert"))} if "bert" in settings else {}
        runs = {name: out / f"{host}-{name.replace(' ', '-')}" for name in ("model 1", "model 2", "realigned")}
        for seed, name in enumerate(("model 1", "model 2")):
            progress(f"{host}, {name}, seed {seed}")
            chosen = {**settings, **bert, "seed": seed, "threads": threads}
            _finished(train(TrainConfig(data=data, out=str(runs[name]), **chosen), progress=False))
        progress(f"{host}, realignment")
        _finished(realign(*map(str, runs.values()), data=data, progress=False, threads=threads))
        members = {name: models.load(folder) for name, folder in runs.items()}
        test = PrecomputedDataset(data, "test", Vocabulary.from_file(runs["realigned"] / run_folder.VOCABULARY))
        tables[host] = cross_table(members, test)
    planes = in_planes({name: pooled_features(model, test) for name, model in members.items()})
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(torch.get_num_threads(), build_info()),
        "hosts": {name: dict(settings) for name, settings in hosts.items()},
        "images": test.n_images,
        "rsum": tables,
        "planes": {
            side: {
                name: [[round(value, 2) for value in point] for point in points.tolist()]
                for name, points in parts.items()
            }
            for side, parts in planes.items()
        },
    }


def _finished(result: TrainResult) -> None:
    if not result.finished:
        raise SystemExit("stopped by a signal; nothing was written")


def _random_bert(folder: Path) -> Path:
    """Write a small BERT with random weights whose pieces are the words of the bundled captions; return its folder."""
    from transformers import BertConfig, BertModel

    words = [word for word in emoji.vocabulary().words if not word.startswith("<")]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(pieces), **_BERT), add_pooling_layer=False).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return folder


def markdown(results: Mapping[str, Any]) -> str:
    """Render the cross table of each host: rows for the image model, columns for the caption model."""
    where, lines = results["environment"], []
    for host, table in results["rsum"].items():
        lines += [
            f"| {host} | {' | '.join(f'captions of {name}' for name in table)} |", f"| --- |{' ---: |' * len(table)}",
            *(f"| images of {name} | {' | '.join(f'{value:.1f}' for value in row.values())} |"
              for name, row in table.items()),
            "",
        ]  # fmt: skip
    said = (
        f"Sum of the six recalls on the {results['images']} images of test, of 600. "
        f"`python -m benchmarks.realignment --threads {where['threads']}` on "
        f"{where['processor']}, {where['date'][:10]}, at {commit_of(where)}."
    )
    return "\n".join([*lines, said]) + "\n"


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the features in their planes as SVG, and sign the file with `source`."""
    draw_planes(path, {
        side: {name: torch.tensor(points) for name, points in parts.items()}
        for side, parts in results["planes"].items()
    })  # fmt: skip
    sign(path, results["planes"])


def source(results: Mapping[str, Any]) -> str:
    """Return the last line of the figure of these results."""
    return source_line(results["planes"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run FDF's cross-model realignment on the bundled data; takes some minutes."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/realignment"), help="folder for data and runs")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    options = parser.parse_args()
    if options.json is not None:
        atomic.check_target(options.json)
    results = run(options.out, threads=options.threads, progress=lambda what: print(what, flush=True))
    if options.json is not None:
        atomic.write_text(options.json, json.dumps(results) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
