"""Read the local folder of a pretrained model of transformers: `config.json` and safetensors weights.

Inside: `check_folder`, `read_config`, `weight_files`, `load_pretrained`. Nothing is downloaded, and nothing in the
folder is executed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from itm_fast.files import documents, regular
from itm_fast.files.messages import shortened, shown
from itm_fast.nn.timm_backbone import TIMM
from itm_fast.nn.vision_backbone import quiet

__all__ = ["check_folder", "load_pretrained", "read_config", "weight_files"]

_WEIGHTS, _SHARDED = "model.safetensors", "model.safetensors.index.json"


def check_folder(folder: Path, what: str, parts: str) -> None:
    """Raise ValueError if there is no folder; the message says how to write one of `what` with its `parts`."""
    if not folder.is_dir():
        found = "expected a folder, found a file" if folder.exists() else "no such folder"
        raise ValueError(
            f"{folder}: {found}; expected a local folder of {what}, as nothing is downloaded: write one with "
            f"save_pretrained of the model and its {parts} in transformers"
        )


def read_config(path: Path, kinds: Collection[str], what: str) -> tuple[dict[str, Any], str]:
    """Return the settings in `config.json`, and the model's type, one of `kinds`.

    The settings of timm name an architecture instead of a type. Their type is "timm".

    Raises:
        ValueError: the file is missing or damaged, or the model is of another kind; the message names `what`.
    """
    try:
        content = documents.read_json(path, documents.MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected the folder of {what}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {shown(content)}")
    kind = content.get("model_type")
    if kind == "timm_wrapper" or (kind is None and "architecture" in content):
        kind = TIMM
        if kind not in kinds:
            raise ValueError(f"{path}: a model of timm; expected the folder of {what} of transformers")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{path}: model_type: expected {', '.join(kinds)}, got {shown(kind)}")
    for name in ("vision_config", "text_config"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(f"{path}: {name}: expected a JSON object, got {shown(content[name])}")
    if any("quantization_config" in part for part in (content, content.get("vision_config", {}))):
        raise ValueError(f"{path}: quantization_config: quantised weights are not supported; save the model without")
    return content, kind


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        ValueError: there are none, their index is damaged, or the folder contains an adapter.
    """
    if regular.is_present(folder / "adapter_config.json"):
        raise ValueError(f"{folder / 'adapter_config.json'}: adapters are not supported; merge them into the model")
    if regular.is_present(folder / _WEIGHTS):
        return [folder / _WEIGHTS]
    if not regular.is_present(folder / _SHARDED):
        raise ValueError(
            f"{folder / _WEIGHTS}: no such file; expected weights as safetensors (save_pretrained of transformers "
            "writes them)"
        )
    index = documents.read_json(folder / _SHARDED, documents.MAX_SETTINGS_BYTES * 16)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors") for name in names.values()
    ):
        raise ValueError(f"{folder / _SHARDED}: expected a weight_map with the names of safetensors files")
    return [folder / name for name in sorted(set(names.values()))]


def load_pretrained(
    cls: Any, content: dict[str, Any], folder: Path, files: list[Path], kind: str, unused: re.Pattern[str] | None = None
) -> Any:
    """Load a model of transformers from the files in `folder` alone.

    Args:
        cls: the class in transformers.
        content: its settings.
        folder: the folder.
        files: its files of weights.
        kind: the model's type, for messages.
        unused: names of weights that may be missing.

    Returns:
        The model in float32 and evaluation mode.

    Raises:
        ValueError: a weight is missing or has another shape, or the files are not those of such a model.
    """
    with quiet():
        try:
            config = cls.config_class.from_dict(content)
            attention = "sdpa" if cls._supports_sdpa else "eager"
            # Only named classes of transformers are built, and only from files in the folder. Weights of another shape
            # are reported below, by name.
            model, found = cls.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                attn_implementation=attention, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except Exception as error:
            reason = shortened(" ".join(str(error).split()), 300)
            raise ValueError(f"{folder}: config.json and weights are not those of a {kind} model ({reason})") from None
    wrong = sorted((name, tuple(theirs), tuple(own)) for name, theirs, own in found["mismatched_keys"])
    if wrong:
        name, theirs, own = wrong[0]
        raise ValueError(f"{files[0]}: {name}: expected shape {own}, got {theirs} ({len(wrong)} such weights in all)")
    missing = sorted(name for name in found["missing_keys"] if unused is None or not unused.search(name))
    if missing:
        raise ValueError(f"{files[0]}: the weight {missing[0]} is missing ({len(missing)} weights in all)")
    return model.float().eval()
