"""Ensembles of the runs of `python -m benchmarks.experiments`: evaluate their mean scores like those of one model.

Inside: `ensemble_result`, `evaluate_ensemble`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from benchmarks.experiments.data import bundled_data
from benchmarks.experiments.files import BUNDLED, Ensemble, Experiment, sha256, shown_path
from benchmarks.experiments.results import result_of
from benchmarks.experiments.traces import as_text
from itm_fast.files import atomic
from itm_fast.files.documents import MAX_SETTINGS_BYTES, read_json
from itm_fast.models.base import WEIGHTS_FILE

__all__ = ["ensemble_result", "evaluate_ensemble"]


def ensemble_result(experiment: Experiment, ensemble: Ensemble, results: Path) -> dict[str, Any] | None:
    """Return the result of an ensemble; None if it is not evaluated yet, or a run of it has no result.

    Raises:
        ValueError: as `result_of`, or it was evaluated with other runs.
    """
    path = results / f"{ensemble.file_name}.json"
    identity = _identity(experiment, ensemble, results)
    if identity is None or not path.exists():
        return None
    result = read_json(path, MAX_SETTINGS_BYTES, "a result as JSON")
    if not isinstance(result, dict) or result.get("identity") != identity:
        raise ValueError(f"{path}: belongs to other runs than the current ones; move it away to evaluate again")
    return result


def evaluate_ensemble(
    experiment: Experiment, ensemble: Ensemble, out: Path, results: Path, *, device: str, threads: int
) -> None:
    """Evaluate the mean scores of runs with run directories in `out`, and write the result.

    Raises:
        ValueError: a run directory holds other weights than those of its result.
    """
    import torch

    import itm_fast
    from itm_fast import evaluation, models
    from itm_fast.data import Vocabulary, open_split
    from itm_fast.files.environment import environment
    from itm_fast.training import run_folder

    identity = _identity(experiment, ensemble, results)
    if identity is None:
        raise ValueError(f"{ensemble.name}: expected a result of each run")
    if threads:
        torch.set_num_threads(threads)
    data = bundled_data(out, experiment.train_images) if experiment.data == BUNDLED else Path(experiment.data)
    members = []
    for run in ensemble.members:
        folder = out / run.file_name
        if sha256(folder / WEIGHTS_FILE) != identity["members"][run.file_name]:
            raise ValueError(f"{folder}: expected the weights that {results / run.file_name}.json was measured with")
        vocabulary = Vocabulary.from_file(folder / run_folder.VOCABULARY)
        dataset = open_split(data, experiment.split, vocabulary, max_images=experiment.images)
        members.append((models.load(folder, device), dataset))
    _, test = evaluation.evaluate_ensemble(members, progress=True, description=ensemble.name)
    result = {
        "identity": identity,
        "environment": {
            **environment(torch.get_num_threads(), itm_fast.build_info()),
            "command": f"python -m benchmarks.experiments run {shlex.quote(shown_path(experiment.path))}",
        },
        "device": device,
        "test": test,
    }
    atomic.write_text(results / f"{ensemble.file_name}.json", as_text(result))


def _identity(experiment: Experiment, ensemble: Ensemble, results: Path) -> dict[str, Any] | None:
    """Return the runs by their weights, and the evaluation data; None if a run has no result or diverged."""
    found = {run.file_name: result_of(experiment, run, results) for run in ensemble.members}
    there = [result for result in found.values() if result is not None and "diverged" not in result]
    if len(there) < len(found):
        return None
    return {
        "row": ensemble.name,
        "split": experiment.split,
        "images": experiment.images,
        "members": {name: result["weights"] for name, result in zip(found, there, strict=True)},
        "evaluation": there[0]["identity"]["fingerprints"]["evaluation"],
    }
