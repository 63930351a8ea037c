"""`itm-fast demo`: train and evaluate on the bundled emoji data, and write a report."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from itm_fast.cli import demo_search
from itm_fast.cli.serve import check_packages

if TYPE_CHECKING:
    from itm_fast.data import PrecomputedDataset
    from itm_fast.models import MatchingModel
    from itm_fast.report import Report
    from itm_fast.training import TrainConfig, TrainResult

# Chosen on the dev split.
SETTINGS: dict[str, Any] = {
    "model": "scan",
    "model_options": {
        "image_encoder": "patches",
        "embed_dim": 128,
        "regulator": "rar",
        "steps": 2,
        "alignment_dim": 64,
        "regulator_dropout": 0.0,
    },
    "epochs": 10,
    "batch_size": 64,
    "lr": 1e-3,
    "lr_schedule": "cosine",
    "warmup_epochs": 1,
}


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the data, the run and the report.")] = Path(
        "runs/demo"
    ),
    minutes: Annotated[
        float, typer.Option(metavar="X", help="Maximum training time; a slow machine trains fewer epochs.")
    ] = 8.0,
    mining: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Negatives: hardest, all, selective (SelHN), semi_hard (SHN) or sct (SCT).",
        ),
    ] = "hardest",
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the weights, the data order and the queries in the report.")
    ] = 0,
    threads: Annotated[int, typer.Option(metavar="N", min=0, help="CPU threads; 0 uses PyTorch's default.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Then search the pictures in a browser. A finished demo is not trained again."),
    ] = False,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port of --serve; 0: a free one.")] = 8080,
) -> None:
    """Train SCAN with RAR on the bundled emoji, evaluate it on unseen pictures, and write a report and a search index.

    The model learns from the raw pixels of 2,821 emoji. The report then searches 500 unseen pictures by caption, and
    captions by picture. The index next to the run directory holds these pictures.
    """
    if serve:
        check_packages()
        if demo_search.is_finished(out):
            demo_search.serve_demo(out, port)
            return
    import torch

    from itm_fast import build_info, evaluation, models
    from itm_fast.data import PrecomputedDataset, emoji
    from itm_fast.files import atomic
    from itm_fast.files.environment import environment
    from itm_fast.files.processors import set_threads
    from itm_fast.report import write_report
    from itm_fast.training import TrainConfig, run_folder, train
    from itm_fast.training.creation import create_model
    from itm_fast.training.metrics_log import MetricsLog, read_metrics
    from itm_fast.training.run import load_data

    if not (math.isfinite(minutes) and minutes > 0):
        raise ValueError(f"minutes: expected a finite number above 0, got {minutes:g}")
    if json_file is not None:
        atomic.check_target(json_file)
    set_threads(threads)
    data = out / "data"
    config = TrainConfig(data=str(data), out=str(out), mining=mining, seed=seed, threads=threads, **SETTINGS)
    demo_search.check_place(out)
    _clear_earlier_demo(config)
    atomic.check_entries(out, [data.name])
    emoji.write_dataset(data)
    config = _fit_into(config, minutes)
    vocabulary, train_data, _ = load_data(config)
    test = PrecomputedDataset(data, "test", vocabulary)

    torch.manual_seed(seed)
    untrained = evaluation.evaluate(
        create_model(config, vocabulary, train_data), test, progress=True, description="test, untrained"
    )
    result = train(config)
    if not result.finished:
        typer.echo(f"stopped after step {result.steps}; run the demo again to start over", err=True)
        raise typer.Exit(130)

    model = models.load(out)
    scores = evaluation.score_matrix(model, test, progress=True, description="test")
    trained = evaluation.evaluate_scores(scores, test.caption_image)
    MetricsLog(out / run_folder.METRICS).write(kind="test", split="test", step=result.best_step, **trained)
    report = _report(
        config, model, result, test, scores, trained, untrained, read_metrics(out / run_folder.METRICS), train_data
    )
    write_report(out / "report.html", report)
    if json_file is not None:
        measured = {
            "environment": environment(torch.get_num_threads(), build_info()),
            "images": test.n_images,
            "captions": len(test),
            "epochs": config.epochs,
            "steps": result.steps,
            "seconds": round(result.seconds, 3),
            "trained": trained,
            "untrained": untrained,
        }
        atomic.write_text(json_file, json.dumps(measured, indent=1) + "\n")
    typer.echo(f"\n{test.n_images} test pictures, {len(test):,} captions:\n")
    typer.echo(evaluation.recall_table({"trained": trained, "untrained": untrained}))
    typer.echo(f"\nreport: {(out / 'report.html').resolve()}")
    demo_search.build_index(out)
    if serve:
        demo_search.serve_demo(out, port)
    else:
        typer.echo("\n" + demo_search.commands(out))


def _clear_earlier_demo(config: TrainConfig) -> None:
    """Remove the run of an earlier demo from the same directory. Raise ValueError if the directory contains anything
    else.
    """
    from itm_fast.training import run_folder
    from itm_fast.training.checkpoint import STATE_FILE
    from itm_fast.training.lock import lock

    out = Path(config.out)
    if (out / run_folder.CONFIG).exists():
        of_run, of_demo = (Path(one.data or "").resolve() for one in (run_folder.saved_config(out), config))
        if of_run != of_demo:
            raise ValueError(f"{out}: contains a run that is not a demo; choose another --out")
        names = (run_folder.CONFIG, run_folder.METRICS, run_folder.VOCABULARY, "model.safetensors", "config.json")
        with lock(out):
            # The report goes first: with it, an interrupted demo would count as finished.
            for name in ("report.html", STATE_FILE, *names):
                (out / name).unlink(missing_ok=True)
    run_folder.check(config, resume=False)


def _fit_into(config: TrainConfig, minutes: float) -> TrainConfig:
    """Return the settings with fewer epochs if all of them would take longer than `minutes` on this machine."""
    import attrs

    from itm_fast.training import Trainer
    from itm_fast.training.creation import create_model
    from itm_fast.training.loss_rules import mining_of
    from itm_fast.training.run import load_data

    vocabulary, train_data, validation_data = load_data(config)
    trainer = Trainer(config, create_model(config, vocabulary, train_data), train_data, validation_data, progress=False)
    mining = mining_of(config)
    seconds = {kind: trainer.seconds_per_step(kind) for kind in ("all", mining)}

    def needed_for(epochs: int) -> float:
        # Validations take about a tenth more.
        warmup = min(epochs, config.warmup_epochs or 0)
        return 1.1 * trainer.steps_per_epoch * (warmup * seconds["all"] + (epochs - warmup) * seconds[mining])

    fitting = next((epochs for epochs in range(config.epochs, 1, -1) if needed_for(epochs) <= minutes * 60), 1)
    if fitting == config.epochs:
        return config
    needed = _minutes(needed_for(config.epochs))
    typer.echo(
        f"{config.epochs} epochs would take about {needed} here; --minutes {minutes:g} leaves time for {fitting}"
    )
    return attrs.evolve(config, epochs=fitting)


def _report(
    config: TrainConfig,
    model: MatchingModel,
    result: TrainResult,
    test: PrecomputedDataset,
    scores: Any,
    trained: dict[str, float],
    untrained: dict[str, float],
    metrics: list[dict[str, Any]],
    train_data: PrecomputedDataset,
) -> Report:
    from itm_fast.data import emoji
    from itm_fast.report import Report
    from itm_fast.report.of_run import searches

    pictures = emoji.pictures("test")
    return Report(
        title="Finding emoji by description",
        lead=(
            f"SCAN with RAR, a model with cross-attention, learned from the raw pixels of {train_data.n_images:,} "
            f"emoji which description belongs to which picture, in {_minutes(result.seconds)} on this computer's "
            f"processor. Below it searches {test.n_images} pictures that it never saw."
        ),
        trained=trained,
        untrained=untrained,
        metrics=metrics,
        facts=_facts(config, model, result, train_data),
        split=test.split,
        credits=emoji.CREDITS,
        **searches(model, test, scores, config.seed, pictures.__getitem__, emoji.names("test")),
    )


def _facts(
    config: TrainConfig, model: MatchingModel, result: TrainResult, train_data: PrecomputedDataset
) -> list[tuple[str, str]]:
    import torch

    import itm_fast
    from itm_fast.files.environment import processor_name

    info = itm_fast.build_info()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [
        ("Model", f"SCAN with RAR, text to image, {model.config.embed_dim} wide"),
        ("Image encoder", "convolutions over 6 x 6 patches of 12 x 12 pixels"),
        ("Text encoder", "bidirectional GRU"),
        ("Parameters", f"{parameters / 1e6:.2f} million"),
        ("Training data", f"{train_data.n_images:,} pictures, {len(train_data):,} captions"),
        ("Training time", f"{_minutes(result.seconds)}, validations included"),
        ("Steps", f"{result.steps:,} of {config.batch_size} pairs; epochs: {config.epochs}"),
        ("Negatives", _negatives(config)),
        ("Best on dev", f"step {result.best_step:,}, sum of recalls {result.best['rsum']:.1f}"),
        ("Kernels of the scores", info["dispatch"]["regulated_scores"]["cpu"]),
        ("Processor", processor_name()),
        ("Threads", str(torch.get_num_threads())),
        ("Software", f"itm_fast {itm_fast.__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
        ("Seed", str(config.seed)),
    ]


def _negatives(config: TrainConfig) -> str:
    """Return the negatives of all epochs, starting with the warm-up."""
    from itm_fast.training.loss_rules import mining_of

    warmup = min(config.warmup_epochs or 0, config.epochs)
    kinds = ["all"] * warmup + [mining_of(config)] * (config.epochs > warmup)
    return ", then ".join(dict.fromkeys(kind.replace("_", "-") for kind in kinds))


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
