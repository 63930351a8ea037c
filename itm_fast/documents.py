"""JSON and YAML that anybody may have written: bounded in size and depth before they are parsed.

Inside: `read_text`, `read_json`, `parse_yaml`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from itm_fast.messages import shortened

__all__ = ["MAX_SETTINGS_BYTES", "parse_yaml", "read_json", "read_text"]

MAX_SETTINGS_BYTES = 2**18
_BLOCK_BYTES = 2**20
_MAX_DEPTH = 20


def read_text(path: str | os.PathLike[str], max_bytes: int, encoding: str = "utf-8") -> str:
    """The text of a file of at most `max_bytes`; a larger one is a ValueError before any of it is read.

    What is no file, such as a pipe, says no size; of it as many bytes are read before it is refused.

    Raises:
        OSError: the file cannot be read. ValueError: it is too large, or no text in UTF-8; the message names it.
    """
    size = Path(path).stat().st_size
    content = bytearray()
    if size <= max_bytes:
        with Path(path).open("rb") as file:
            # Piece by piece: to read so many bytes takes memory for all of them, however small the file is.
            while len(content) <= max_bytes:
                block = file.read(min(_BLOCK_BYTES, max_bytes + 1 - len(content)))
                if not block:
                    break
                content += block
    if max(size, len(content)) > max_bytes:
        found = f"the file has {size:,}" if size > max_bytes else "there are more"
        raise ValueError(f"{path}: expected at most {max_bytes:,} bytes, {found}")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8 (byte {error.start}: {error.reason})") from None


def read_json(path: str | os.PathLike[str], max_bytes: int, what: str = "JSON") -> Any:
    """The content of a JSON file in UTF-8, with or without a byte order mark.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is larger than `max_bytes`, or not `what` (the words of the message), or nested too deeply.
    """
    text = read_text(path, max_bytes, "utf-8-sig")
    try:
        return json.loads(text)
    except ValueError as error:  # No JSON, or an integer of more digits than Python reads.
        raise ValueError(f"{path}: expected {what}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: expected {what}: nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Plain values from YAML.

    Raises:
        ValueError: it is no YAML of plain values, is nested too deeply, or uses aliases, with which a few lines can
            stand for any number of values. The message is one line.
    """
    try:
        depth = 0
        # Events come one by one and without recursion, so that depth is known before anything is built.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"aliases (*{event.anchor}) are not read")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        return yaml.safe_load(text)
    # Besides its own errors, PyYAML lets those of Python's int, float and datetime through.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(shortened(" ".join(str(error).split()), 400)) from None
