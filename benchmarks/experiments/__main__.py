"""Train the runs of an experiment one after the other, and write tables and figures of the results.

    python -m benchmarks.experiments run benchmarks/experiments/rcar-claims.yaml
    python -m benchmarks.experiments page docs/performance/results/rcar.md [--run | --check]

An experiment is a YAML file with these keys:

- `title`; `data`: a folder, or "emoji" for the bundled data; `train_images`: number of bundled training images.
- `split` to evaluate, and the number of its first `images` to use (default: all).
- `seeds`; `train`: settings of itm-fast train for all runs.
- `grid`: a `seed` that no row has, and `choices`, settings by their labels. Each row is trained with each choice; the
  one with the greatest sum of recalls on the validation split is used with the row's `seeds`.
- `rows`: each with a `name`, `train` with additional settings, and optionally `seeds`. A row with the scenario oas has
  an `anchor_row`, the name of an earlier row: run by run, its anchor is the model of that row with the same seed.
  A row with a `start_row` starts from the models of an earlier row in the same way.
  `choices` replace those of the grid for the row, by as many; with `{}` the row has fixed settings. `grid_row` names an
  earlier row whose choice is used. A row whose anchor or start has fixed settings may choose: its trials use the model
  of that row with the grid's seed.
- `claims`: each a `text` that a `row` is better than another one (`over`), by the sum of recalls or another measure
  (`of`: mean_distance, i2t_r1, t2i_r1). The table compares them seed by seed. `late` claims, which were listed after
  their runs, are marked by a dagger.
- `equal`: pairs of rows whose results must agree in every digit.
- `ensembles`: each with a `name`, a `row` and `seeds` of it, or several `rows` and a `seed` (default: 0). The mean
  scores of these runs are evaluated as a separate row once all runs are done. With `groups`, lists of seeds of the
  `row`, there is one ensemble for each; claims may name it as a row, whose seeds are the first ones of the lists.
- `figures`: each with a `file` (SVG, for docs/images), a `text` that describes it, `rows`, optionally a
  `seed`, and what it `shows`: "training", or the "scores" of positive and negative pairs.

`run` may be called several times, or with `--jobs`: the processes share the runs. `page` draws the figures and writes
the tables of all experiments that a page has markers for. With `--run` it first trains what has no result.

Each run writes one JSON file atomically. A run whose loss is no longer finite has the result that it diverged: it wins
no grid, and its row has no mean. A run with a result is not repeated; an interrupted or killed run resumes from
its run directory. If a file or folder belongs to other settings or other data, the tool refuses and names the
difference: results are never overwritten or reused for other settings.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.experiments.data import bundled_data
from benchmarks.experiments.ensembles import ensemble_result, evaluate_ensemble
from benchmarks.experiments.figures import draw
from benchmarks.experiments.files import BUNDLED, ROOT, Experiment, Run, sha256, shown_path
from benchmarks.experiments.queue import work_off
from benchmarks.experiments.reading import read
from benchmarks.experiments.results import ANCHOR, result_of, weights_of, with_winners
from benchmarks.experiments.tables import experiments_of, rendered, table
from benchmarks.experiments.traces import as_text, score_histogram, training_curves
from itm_fast import config as settings
from itm_fast.files import atomic
from itm_fast.models.base import WEIGHTS_FILE
from itm_fast.training import TrainConfig

LISTS, RESULTS = ROOT / "benchmarks" / "experiments", ROOT / "benchmarks" / "results" / "experiments"
RUNS = Path("runs/experiments")


def execute(experiment: Experiment, run: Run, out: Path, results: Path, **machine: Any) -> bool:
    """Train and evaluate one run and write its result; False if a signal stopped it."""
    import torch

    import itm_fast
    from itm_fast.files.environment import environment
    from itm_fast.training import checkpoint, run_folder
    from itm_fast.training.metrics_log import read_metrics

    data = str(bundled_data(out, experiment.train_images)) if experiment.data == BUNDLED else experiment.data
    folder = out / run.file_name
    config = run.config(data, folder, **machine)
    resume = (folder / checkpoint.STATE_FILE).is_file()
    anchor = _anchor_weights(experiment, run, out, results, resume)
    fingerprints = {**(experiment.fingerprints(run) or {}), **anchor}
    identity = {**experiment.identity(run), "fingerprints": fingerprints}
    load, cpu_seconds = os.getloadavg()[0], _cpu_seconds()
    outcome = _outcome(experiment, config, resume)
    if outcome is None:
        return False
    # The threads of this process; with --jobs, several processes share the list.
    threads = torch.get_num_threads()
    command = f"python -m benchmarks.experiments run {shlex.quote(shown_path(experiment.path))} --threads {threads}"
    log = folder / run_folder.METRICS  # Missing if the first step diverged.
    result = {
        "identity": identity,
        "environment": {**environment(threads, itm_fast.build_info()), "command": command},
        "device": config.device,
        # Over all threads and processes: training and evaluation, including reading of data. For a run that was
        # resumed, only the wall-clock time of its earlier part is known.
        "cpu_seconds": None if resume else round(_cpu_seconds() - cpu_seconds, 2),
        # Other work on the machine: load averages over a minute, including this run's threads.
        "load_average": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "curves": training_curves(read_metrics(log, ("kind", "step")) if log.is_file() else []),
        **outcome,
    }
    atomic.write_text(results / f"{run.file_name}.json", as_text(result))
    return True


def _outcome(experiment: Experiment, config: TrainConfig, resume: bool) -> dict[str, Any] | None:
    """Train and evaluate a run, and return what its result says of that; None if a signal stopped it."""
    from itm_fast import evaluation, models
    from itm_fast.data import Vocabulary, open_split
    from itm_fast.training import run_folder, train
    from itm_fast.training.branch import DivergedError

    started = time.monotonic()
    try:
        trained = train(config, resume=resume)
    except DivergedError as error:
        seconds = round(time.monotonic() - started, 1)
        return {"seconds": seconds, "diverged": str(error), "validation": {}, "test": None}
    if not trained.finished:
        return None
    started, folder = time.monotonic(), Path(config.out)
    vocabulary = Vocabulary.from_file(folder / run_folder.VOCABULARY)
    dataset = open_split(config.data, experiment.split, vocabulary, max_images=experiment.images)
    model = models.load(folder, config.device)
    scores = evaluation.score_matrix(model, dataset, progress=True, description=experiment.split)
    return {
        "seconds": round(trained.seconds + time.monotonic() - started, 1),
        "steps": trained.steps,
        "best_step": trained.best_step,
        "validation": trained.best,
        "test": evaluation.evaluate_scores(scores, dataset.caption_image),
        "weights": sha256(folder / WEIGHTS_FILE),
        "scores": score_histogram(scores, dataset.caption_image),
    }


def _anchor_weights(experiment: Experiment, run: Run, out: Path, results: Path, resume: bool) -> dict[str, Any]:
    """Return the anchor's weights in the fingerprints of a run; ValueError if its folder holds other ones.

    The run's folder records them, because a resumed run keeps the anchor that it started with.
    """
    if run.anchor is None:
        return {}
    result = results / f"{run.anchor.file_name}.json"
    found = result_of(experiment, run.anchor, results) or {}
    weights, path = found.get("weights"), out / run.anchor.file_name / WEIGHTS_FILE
    kept = out / run.file_name / "anchor.txt"
    if weights is None or not path.is_file() or sha256(path) != weights:
        raise ValueError(
            f"{path}: expected the weights that {result} was measured with; move that file away to train again"
        )
    if resume and kept.read_text(encoding="utf-8").strip() != weights:
        raise ValueError(
            f"{kept.parent}: holds a run with other weights of its {run.role} {run.anchor.row}; move it away"
        )
    atomic.write_text(kept, f"{weights}\n")
    return {ANCHOR: weights_of(run, found)}


def _cpu_seconds() -> float:
    """Return processor time so far, of all threads of this process and of its finished child processes."""
    return sum(os.times()[:4])


def _run(options: argparse.Namespace, experiment: Experiment, results: Path) -> int:
    out = options.out or RUNS / experiment.path.stem
    for name in options.row or ():
        if name not in experiment.rows:
            raise ValueError(settings.unknown_name("row", name, list(experiment.rows)))
    machine = {"device": options.device, "threads": options.threads}
    chosen = _chosen(options, with_winners(experiment, results))
    print(
        f"{len(chosen)} runs, {len(chosen) - len(_todo(options, experiment, results))} of them done before", flush=True
    )
    command = [sys.executable, "-m", "benchmarks.experiments", *options.arguments, "--jobs", "1"]
    others = [subprocess.Popen(command) for _ in range(options.jobs - 1)]
    finished = work_off(
        lambda: _todo(options, experiment, results),
        lambda run: execute(with_winners(experiment, results), run, out, results, **machine),
        out,
    )
    codes = [process.wait() for process in others]
    if not finished or any(codes):
        print("stopped; the same command resumes", file=sys.stderr)
        return 130 if not finished else max(codes)
    experiment = with_winners(experiment, results)
    names = {run.file_name for run in _chosen(options, experiment)}
    for ensemble in experiment.ensembles:
        found = [result_of(experiment, run, results) or {} for run in ensemble.members]
        mine = all(run.file_name in names for run in ensemble.members) and not any("diverged" in one for one in found)
        if mine and ensemble_result(experiment, ensemble, results) is None:
            print(f"{ensemble.name}: mean scores of {len(ensemble.members)} runs", flush=True)
            evaluate_ensemble(experiment, ensemble, out, results, **machine)
    return 0


def _chosen(options: argparse.Namespace, experiment: Experiment) -> list[Run]:
    """Return the runs that the options name, seed by seed, so that rows can be compared early, after their trials."""
    chosen = [run for runs in experiment.rows.values() for run in runs]
    chosen = [run for run in chosen if not options.row or run.row in options.row]
    chosen = sorted((run for run in chosen if options.seed in (None, run.seed)), key=lambda run: run.seed)
    in_order = [one for run in chosen for one in run.tried()] + [one for run in chosen for one in run.in_order()]
    return list({one.file_name: one for one in in_order}.values())


def _todo(options: argparse.Namespace, experiment: Experiment, results: Path) -> list[Run]:
    experiment = with_winners(experiment, results)
    return [run for run in _chosen(options, experiment) if result_of(experiment, run, results) is None]


def _figures(options: argparse.Namespace, experiment: Experiment, results: Path) -> int:
    experiment = with_winners(experiment, results)
    for figure in experiment.figures:
        draw(experiment, figure, results)
        print(shown_path(figure.path))
    return 0


def _table(options: argparse.Namespace, experiment: Experiment, results: Path) -> int:
    print(table(with_winners(experiment, results), results), end="")
    return 0


def _page(options: argparse.Namespace) -> int:
    # `render` imports the tools of all benchmarks, which `run` does not need.
    from benchmarks import render

    before = after = options.page.read_text(encoding="utf-8")
    names = experiments_of(before)
    if not names:
        raise ValueError(f"{options.page}: expected at least one line '<!-- experiment NAME -->'")
    for name in names:
        path, results = LISTS / f"{name}.yaml", RESULTS / name
        if options.run:
            shared = ["--jobs", str(options.jobs), "--threads", str(options.threads)]
            code = main(["run", str(path), "--results", str(results), *shared])
            if code:
                return code
        experiment = read(path)
        if not options.check:
            _figures(options, experiment, results)
        after = rendered(after, name, table(with_winners(experiment, results), results))
    if (path := options.page.resolve()) in render.PAGES:
        after = render.rendered(path, after)
        render.draw_figures(path, options.check)
    if options.check and after != before:
        raise ValueError(f"{options.page}: is out of date; write it again without --check")
    if not options.check:
        atomic.write_text(options.page, after)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run experiments, and write tables and figures of their results.")
    commands = parser.add_subparsers(required=True, metavar="run|figures|table|page")
    run = commands.add_parser("run", help="train and evaluate runs without a result")
    run.add_argument("--out", type=Path, help=f"folder of the run directories (default: {RUNS}/NAME)")
    run.add_argument("--row", action="append", help="only this row; may be repeated")
    run.add_argument("--seed", type=int, help="only this seed")
    run.add_argument("--device", default="cpu")
    run.set_defaults(action=_run)
    figures = commands.add_parser("figures", help="draw the figures")
    figures.set_defaults(action=_figures)
    write = commands.add_parser("table", help="print the table")
    write.set_defaults(action=_table)
    for command in (run, figures, write):
        command.add_argument("experiment", type=Path, metavar="FILE", help="the experiment as YAML")
        command.add_argument(
            "--results", type=Path, help="folder of the JSON files (default: under benchmarks/results)"
        )
    page = commands.add_parser("page", help="draw the figures and write the tables of a page")
    page.add_argument("page", type=Path, metavar="PAGE", help="Markdown file with the markers of experiments")
    how = page.add_mutually_exclusive_group()
    how.add_argument("--run", action="store_true", help="first train and evaluate runs without a result")
    how.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    for command in (run, page):
        command.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
        command.add_argument("--jobs", type=int, default=1, help="processes that share the runs (default: 1)")
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if "page" in options:
            return _page(options)
        experiment = read(options.experiment)
        return options.action(options, experiment, options.results or RESULTS / experiment.path.stem)
    except (ValueError, OSError) as error:
        print(f"experiments: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # Runs take hours: other work on the machine goes first.
    os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))
    sys.exit(main())
