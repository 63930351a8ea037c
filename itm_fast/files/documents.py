"""Read JSON and YAML from untrusted sources. Size and depth are limited before anything is parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from itm_fast.files.messages import shortened

__all__ = ["MAX_SETTINGS_BYTES", "parse_yaml", "read_json", "read_text"]

MAX_SETTINGS_BYTES = 2**18
_BLOCK_BYTES = 2**20
_MAX_DEPTH = 20


def read_text(path: str | os.PathLike[str], max_bytes: int, encoding: str = "utf-8") -> str:
    """Return the text of a file. A file larger than `max_bytes` is refused before any of it is read.

    A pipe or device has no size, so up to `max_bytes` are read before it is refused.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large or is not UTF-8 text; the message names it.
    """
    size = Path(path).stat().st_size
    content = bytearray()
    if size <= max_bytes:
        with Path(path).open("rb") as file:
            # Read in blocks: file.read(n) allocates n bytes even for a small file.
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
    """Return the content of a UTF-8 JSON file, with or without a byte order mark.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is larger than `max_bytes`, is not valid JSON, or is nested too deeply. The message says
            that `what` was expected.
    """
    text = read_text(path, max_bytes, "utf-8-sig")
    try:
        return json.loads(text)
    except ValueError as error:  # Not JSON, or an integer with more digits than Python reads.
        raise ValueError(f"{path}: expected {what}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: expected {what}: nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Return the plain values in a YAML text.

    Aliases are refused because a few lines with aliases can expand to any number of values.

    Raises:
        ValueError: the text is not YAML with plain values, is nested too deeply, or uses aliases. The message is one
            line.
    """
    try:
        depth = 0
        # Events arrive one by one without recursion, so the depth is known before any value is built.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"aliases (*{event.anchor}) are not read")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        return yaml.safe_load(text)
    # PyYAML also passes on the errors of Python's int, float and datetime.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(shortened(" ".join(str(error).split()), 400)) from None
