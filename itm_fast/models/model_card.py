"""Model cards for the Hugging Face Hub: what a model is, how it was trained, and how well it retrieves.

Inside: `CARD_FILE`, `Described`, `card_data`, `card_text`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import attrs
import torch
import yaml

from itm_fast import config as settings
from itm_fast.files import regular
from itm_fast.files.documents import MAX_SETTINGS_BYTES, parse_json, parse_yaml, read_json, read_text
from itm_fast.files.environment import source_commit
from itm_fast.files.messages import shown
from itm_fast.files.run_files import CHECKPOINT, CONFIG, METRICS, PATHS
from itm_fast.files.torch_files import load_plain
from itm_fast.version import __version__

__all__ = ["CARD_FILE", "Described", "card_data", "card_text"]

CARD_FILE = "README.md"
_MAX_RESULT_BYTES = 2**20
# Numbers in the file of `itm-fast evaluate --json` that are no measures.
_NO_MEASURES = ("images", "folds", "seconds", "rerank")
_TASK = "image-text-retrieval"


@attrs.frozen
class Measured:
    """The measures of one protocol: values by name, and intervals by name for those that have one."""

    title: str
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]


@attrs.frozen
class Described:
    """What a card says.

    Attributes:
        title: name of the repository, or of the model.
        name, summary: name and one line about the model.
        config: settings of the model.
        parameters: number of its weights.
        measured: results by protocol.
        training: settings of the run, without the folders of its paths; empty without a run.
        best: the best validation of the run; empty without one.
        data: SHA-256 digests of the data by file; empty if the run keeps none.
    """

    title: str
    name: str
    summary: str
    config: dict[str, Any]
    parameters: int
    measured: list[Measured]
    training: dict[str, Any]
    best: dict[str, Any]
    data: dict[str, str]

    @classmethod
    def of(cls, model: Any, run: str | os.PathLike[str] | None, results: Any, repo_id: str | None) -> Described:
        """Describe a model, its run directory, and its results: a file of measures or its content.

        Raises:
            ValueError: a file is missing or damaged; the message names it.
        """
        training: dict[str, Any] = {}
        best: dict[str, Any] = {}
        data: dict[str, str] = {}
        if run is not None:
            training, best, data = _settings(Path(run)), _best(Path(run)), _fingerprints(Path(run))
        return cls(
            title=repo_id or model.name,
            name=model.name,
            summary=model.summary,
            config=settings.to_dict(model.config),
            parameters=sum(weight.numel() for weight in model.parameters()),
            measured=[] if results is None else _measured(results),
            training=training,
            best=best,
            data=data,
        )


def card_data(described: Described) -> str:
    """Return the metadata of the card as YAML: the keys that the Hub reads, with the results as `model-index`."""
    data: dict[str, Any] = {"library_name": "itm_fast", "tags": ["image-text-matching", described.name]}
    if described.measured:
        results = [
            {
                "task": {"type": _TASK},
                "dataset": {"name": one.title, "type": one.title},
                "metrics": [{"type": name, "value": value} for name, value in one.values.items()],
            }
            for one in described.measured
        ]
        data["model-index"] = [{"name": described.title, "results": results}]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).strip()


def card_text(described: Described) -> str:
    """Return the card as Markdown, without its metadata."""
    parts = [
        f"# {described.title}",
        f"{described.summary} {described.parameters:,} parameters, trained with itm_fast.",
        "```python\nfrom itm_fast.models import MatchingModel\n\n"
        f'model = MatchingModel.from_pretrained("{described.title}")\n'
        "scores = model.score(model.encode_images(features), model.encode_captions(captions))\n```",
    ]
    for one in described.measured:
        rows = (
            (name, f"{value:.2f}", " to ".join(f"{end:.2f}" for end in one.intervals.get(name, ())))
            for name, value in one.values.items()
        )
        parts += [f"## Results: {one.title}", _table(("measure", "value", "95 % interval"), rows)]
    if described.training:
        recipe = described.training.get("recipe")
        started = f"Started from the recipe `{recipe}` of itm_fast, with these settings:" if recipe else ""
        parts += ["## Training", _validation(described.best), started, _yaml(described.training)]
    if described.data:
        digests = ((name, f"`{digest}`") for name, digest in described.data.items())
        parts += ["## Data", "SHA-256 digests:", _table(("file", "digest"), digests)]
    parts += ["## Model settings", _yaml({"model": described.name, **described.config}), "## Software", _software()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(heads)]
    lines += [tuple("-" * 3 for _ in lines[0]), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _yaml(values: Mapping[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)}```"


def _validation(best: Mapping[str, Any]) -> str:
    if not best:
        return ""
    return f"Best validation: RSUM {best['rsum']:.1f} on `{best.get('split', 'dev')}` after step {best['step']}."


def _software() -> str:
    commit, changed = source_commit()
    source = "" if commit is None else f" (commit `{commit}`{', with uncommitted changes' if changed else ''})"
    others = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"This card was written with itm_fast {__version__}{source}, {others}."


def _settings(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file; {run} is not a run directory")
    try:
        found = parse_yaml(read_text(path, MAX_SETTINGS_BYTES))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected names and values, got {shown(found)}")
    return {
        # A card shows only the last part of a path, since the rest describes the machine.
        name: PurePath(value).name if name in PATHS and isinstance(value, str) else value
        for name, value in found.items()
    }


def _best(run: Path) -> dict[str, Any]:
    path = run / METRICS
    best: dict[str, Any] = {}
    if not regular.is_file(path):
        return {}
    for number, text in enumerate(regular.read_bytes(path).splitlines(), start=1):
        try:
            line = parse_json(text)
            judged = line["kind"] == "validation" and (not best or line["rsum"] >= best["rsum"])
            if judged and type(line["step"]) is not int:
                raise TypeError
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{path}: line {number}: expected a line of the log, got {_line(text)}") from None
        best = line if judged else best
    return best


def _line(text: bytes) -> str:
    return shown(text.decode(errors="replace"))


def _fingerprints(run: Path) -> dict[str, str]:
    path = run / CHECKPOINT
    if not regular.is_file(path):
        return {}
    try:
        state = load_plain(path)
    except ValueError as error:
        raise ValueError(f"{path}: not a readable training state: {error}") from None
    data = state.get("data") if isinstance(state, dict) else None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: the training state has no 'data': damaged, or of another version of itm_fast")
    return {str(name): str(digest) for name, digest in data.items()}


def _measured(results: Any) -> list[Measured]:
    source = "results"
    if not isinstance(results, Mapping):
        source = str(results)
        try:
            results = read_json(results, _MAX_RESULT_BYTES)
        except FileNotFoundError:
            raise ValueError(f"{source}: no such file; itm-fast score --json writes one") from None
    protocols = results.get("protocols") if isinstance(results, Mapping) else None
    if isinstance(protocols, Mapping):
        found = {str(name): one for name, one in protocols.items()}
    elif isinstance(results, Mapping) and ("rsum" in results or "protocol" in results):
        found = {str(results.get("protocol") or results.get("split") or "full"): results}
    else:
        found = {}
    if not found or not all(isinstance(one, Mapping) for one in found.values()):
        raise ValueError(
            f"{source}: expected the result of itm-fast score --json or itm-fast evaluate --json, got {shown(results)}"
        )
    return [Measured(name, _numbers(one), _intervals(one, f"{source}: {name}")) for name, one in found.items()]


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in result.items()
        if type(value) in (int, float) and name not in _NO_MEASURES
    }


def _intervals(result: Mapping[str, Any], where: str) -> dict[str, tuple[float, float]]:
    try:
        # JSON has null for numbers that are not finite.
        intervals = {name: ends for name, ends in result.get("intervals", {}).items() if None not in ends}
        return {str(name): (float(low), float(high)) for name, (low, high) in intervals.items()}
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{where}: intervals: expected two numbers for each measure") from None
