"""Trains the runs of an experiment one after the other, and writes tables of what came of them.

    python tools/experiments.py run   benchmarks/experiments/rcar.yaml
    python tools/experiments.py table benchmarks/experiments/rcar.yaml --page docs/results/rcar.md [--check]

An experiment is a YAML file: `title`, `data` (a folder, or "emoji" for the bundled data), `split` to evaluate and
`images` of it (the first so many; all where absent), `train_images` of the bundled data to train with, `seeds`, `train`
(settings of itm-fast train for all runs), `rows` (each with a `name`, `train` with its own settings, and perhaps its
own `seeds`), and `equal`: pairs of rows whose results must be the same to the last digit.

Each run leaves one JSON file, written in one step. A run that has one is not repeated; one that was interrupted, or
killed, goes on from its RUN folder. Where a file or a folder is of other settings, or of data with other content, the
tool refuses and says what differs: what was measured is never overwritten, and never stands for what was not.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from experiment_data import bundled_data
from experiment_files import BUNDLED, ROOT, Experiment, Run, read, result_of, shown_path
from experiment_tables import rendered, table

from itm_fast import config as settings
from itm_fast import files

RESULTS, RUNS = ROOT / "benchmarks" / "results" / "experiments", Path("runs/experiments")


def execute(experiment: Experiment, run: Run, out: Path, results: Path, **machine: Any) -> bool:
    """Trains and evaluates one run and writes its result; False where a signal stopped it."""
    import torch

    import itm_fast
    from itm_fast import evaluation, models
    from itm_fast.benchmarking.run import environment
    from itm_fast.data import PrecomputedDataset, Vocabulary
    from itm_fast.training import checkpoint, run_folder, train

    data = str(bundled_data(out, experiment.train_images)) if experiment.data == BUNDLED else experiment.data
    folder = out / run.file_name
    config = run.config(data, folder, **machine)
    identity = {**experiment.identity(run), "fingerprints": experiment.fingerprints(run)}
    resume = (folder / checkpoint.STATE_FILE).is_file()
    load, cpu_seconds = os.getloadavg()[0], _cpu_seconds()
    trained = train(config, resume=resume)
    if not trained.finished:
        return False
    started = time.monotonic()
    vocabulary = Vocabulary.from_file(folder / run_folder.VOCABULARY)
    dataset = PrecomputedDataset(data, experiment.split, vocabulary, max_images=experiment.images)
    model = models.load(folder, config.device)
    test = evaluation.evaluate(model, dataset, progress=True, description=experiment.split)
    command = f"python tools/experiments.py run {shlex.quote(shown_path(experiment.path))}"
    result = {
        "identity": identity,
        "environment": {**environment(torch.get_num_threads(), itm_fast.build_info()), "command": command},
        "device": config.device,
        # By the clock, and of all threads and processes: training and evaluation, reading of data included. What a run
        # took before it was resumed is known by the clock alone.
        "seconds": round(trained.seconds + time.monotonic() - started, 1),
        "cpu_seconds": None if resume else round(_cpu_seconds() - cpu_seconds, 2),
        # What else the machine did: its load averages over a minute, this run's own threads included.
        "load_average": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "steps": trained.steps,
        "best_step": trained.best_step,
        "validation": trained.best,
        "test": test,
    }
    files.write_text(results / f"{run.file_name}.json", json.dumps(result, indent=2) + "\n")
    return True


def _cpu_seconds() -> float:
    """Time on processors so far, of all threads of this process and of the processes that it started and that ended."""
    return sum(os.times()[:4])


def _run(options: argparse.Namespace, experiment: Experiment, results: Path) -> int:
    out = options.out or RUNS / experiment.path.stem
    chosen = [run for runs in experiment.rows.values() for run in runs]
    for name in options.row or ():
        if name not in experiment.rows:
            raise ValueError(settings.unknown_name("row", name, list(experiment.rows)))
    chosen = [run for run in chosen if not options.row or run.row in options.row]
    # Seed by seed, so that rows can be compared early.
    chosen = sorted((run for run in chosen if options.seed in (None, run.seed)), key=lambda run: run.seed)
    todo = [run for run in chosen if result_of(experiment, run, results) is None]
    print(f"{len(chosen)} runs, {len(chosen) - len(todo)} of them done before", flush=True)
    for run in todo:
        print(f"{run.row}, seed {run.seed}: {out / run.file_name}", flush=True)
        if not execute(experiment, run, out, results, device=options.device, threads=options.threads):
            print("stopped; the same command goes on from here", file=sys.stderr)
            return 130
    return 0


def _table(options: argparse.Namespace, experiment: Experiment, results: Path) -> int:
    text = table(experiment, results)
    if options.page is None:
        print(text, end="")
        return 0
    before = options.page.read_text(encoding="utf-8")
    after = rendered(before, experiment.path.stem, text)
    if options.check and after != before:
        raise ValueError(f"{options.page}: is out of date; make it anew without --check")
    if not options.check:
        files.write_text(options.page, after)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs experiments and writes tables of their results.")
    commands = parser.add_subparsers(required=True, metavar="run|table")
    run = commands.add_parser("run", help="train and evaluate what has no result yet")
    run.add_argument("--out", type=Path, help=f"folder of the RUN folders (default: {RUNS}/NAME)")
    run.add_argument("--row", action="append", help="only this row; may be given again")
    run.add_argument("--seed", type=int, help="only this seed")
    run.add_argument("--device", default="cpu")
    run.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    run.set_defaults(action=_run)
    write = commands.add_parser("table", help="print the table, or write it into a page")
    write.add_argument("--page", type=Path, help="Markdown file with the markers of the experiment")
    write.add_argument("--check", action="store_true", help="change nothing; fail where the page is out of date")
    write.set_defaults(action=_table)
    for command in (run, write):
        command.add_argument("experiment", type=Path, metavar="FILE", help="the experiment as YAML")
        command.add_argument(
            "--results", type=Path, help="folder of the JSON files (default: under benchmarks/results)"
        )
    options = parser.parse_args(arguments)
    try:
        experiment = read(options.experiment)
        return options.action(options, experiment, options.results or RESULTS / experiment.path.stem)
    except (ValueError, OSError) as error:
        print(f"experiments: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
