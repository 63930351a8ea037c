"""Results of the runs of `python -m benchmarks.experiments`: read them, and choose settings by them.

Inside: `result_of`, `weights_of`, `with_winners`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from benchmarks.experiments.files import Experiment, Run, kept_settings
from itm_fast import config as settings
from itm_fast.files.documents import MAX_SETTINGS_BYTES, read_json
from itm_fast.files.messages import shown
from itm_fast.training import TrainConfig, recipes
from itm_fast.training.loss_rules import present_defaults

__all__ = ["ANCHOR", "result_of", "weights_of", "with_winners"]

ANCHOR = "anchor"  # In fingerprints, next to the purposes of data.
_ADVICE = "move it away to measure again, or undo the change"


def result_of(experiment: Experiment, run: Run, results: Path) -> dict[str, Any] | None:
    """Return the result of a run; None if it does not exist yet.

    Raises:
        ValueError: the file is damaged, or has other settings, other data, or an anchor with other weights; the
            message names the first difference.
    """
    path = results / f"{run.file_name}.json"
    if run.pending or not path.exists():
        return None
    result = read_json(path, MAX_SETTINGS_BYTES, "a result as JSON")
    before = result.get("identity") if isinstance(result, dict) else None
    if not isinstance(before, dict) or not all(isinstance(before.get(n), dict) for n in ("train", "fingerprints")):
        raise ValueError(f"{path}: expected a result of an experiment, with its settings and what its data held")
    held = before["fingerprints"]
    before = _with_defaults({name: value for name, value in before.items() if name != "fingerprints"})
    for name, old, new in _differences(before, json.loads(json.dumps(experiment.identity(run)))):
        raise ValueError(f"{path}: was measured with {name} = {shown(old)}, not {shown(new)}; {_ADVICE}")
    now = experiment.fingerprints(run) or {use: content for use, content in held.items() if use != ANCHOR}
    anchor = None if run.anchor is None else result_of(experiment, run.anchor, results)
    # Without a result of the anchor, its weights are unknown.
    weights = held.get(ANCHOR) if anchor is None else weights_of(run, anchor)
    for name, _, _ in _differences(held, now if run.anchor is None else {**now, ANCHOR: weights}):
        raise ValueError(f"{path}: was measured with other content of {name}; {_ADVICE}")
    return result


def _with_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Add settings that are newer than the file, with their defaults, also to those of the anchor.

    Settings without effect have their present defaults.
    """
    train = settings.with_present_names(TrainConfig, identity["train"], quiet=True)
    train = {**kept_settings(TrainConfig(data="", out="")), **train}
    found = {**identity, "train": {**train, **present_defaults(train)}}
    anchor = identity.get("anchor")
    return {**found, "anchor": _with_defaults(anchor)} if isinstance(anchor, dict) and "train" in anchor else found


def weights_of(run: Run, anchor_result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a run's anchor that has this result."""
    return {f"the weights of {run.anchor.row}": anchor_result.get("weights")} if run.anchor else {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*now, *before]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new)
        elif old != new:
            yield name, old, new


def with_winners(experiment: Experiment, results: Path) -> Experiment:
    """Return the experiment in which each row with a complete grid trains with the settings of its best trial.

    The best trial has the greatest sum of recalls on the validation split.
    """
    rows = {name: [_resolved(experiment, run, results) for run in runs] for name, runs in experiment.rows.items()}
    now = {run.file_name: run for runs in rows.values() for run in runs}
    rows = {
        name: [run if run.anchor is None else attrs.evolve(run, anchor=now[run.anchor.file_name]) for run in runs]
        for name, runs in rows.items()
    }
    now = {run.file_name: run for runs in rows.values() for run in runs}
    ensembles = [attrs.evolve(one, members=[now[run.file_name] for run in one.members]) for one in experiment.ensembles]
    figures = [attrs.evolve(one, runs=[now[run.file_name] for run in one.runs]) for one in experiment.figures]
    return attrs.evolve(experiment, rows=rows, ensembles=ensembles, figures=figures)


def _resolved(experiment: Experiment, run: Run, results: Path) -> Run:
    found = [result_of(experiment, trial, results) for trial in run.trials]
    measured = [result for result in found if result is not None]
    if not found or len(measured) < len(found):
        return run
    sums = [result["validation"]["rsum"] if result["validation"] else -1.0 for result in measured]
    best = list(run.choices)[sums.index(max(sums))]
    train = recipes.merge(run.train, run.choices[best])
    return attrs.evolve(run, train=train, pending=False, winner=best)
