"""Read JSON and YAML from untrusted sources, and write JSON. Size and depth are limited before anything is parsed."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from typing import Any

import yaml

from itm_fast.files.messages import shortened, shown
from itm_fast.files.regular import open_file

__all__ = ["MAX_SETTINGS_BYTES", "check_characters", "json_text", "parse_json", "parse_yaml", "read_json", "read_text"]

MAX_SETTINGS_BYTES = 2**18
_MAX_DEPTH = 20


def read_text(path: str | os.PathLike[str], max_bytes: int, encoding: str = "utf-8") -> str:
    """Return the text of a file. A file larger than `max_bytes` is refused before any of it is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large, is not UTF-8 text, or is no regular file; the message names it.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path}: expected at most {max_bytes:,} bytes, the file has {size:,}")
        # A file that grows meanwhile, or one of /proc, may have more bytes than its size says.
        content = file.read(size + 1)
    if len(content) > size:
        raise ValueError(f"{path}: expected {size:,} bytes, as the size of the file says, found more")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8 (byte {error.start}: {error.reason})") from None


def read_json(path: str | os.PathLike[str], max_bytes: int, what: str = "JSON") -> Any:
    """Return the content of a UTF-8 JSON file, with or without a byte order mark.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is larger than `max_bytes`, or `parse_json` refuses it. The message names the file and says
            that `what` was expected.
    """
    text = read_text(path, max_bytes, "utf-8-sig")
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: expected {what}: {error}") from None


def json_text(content: Any) -> str:
    """Return `content` as indented JSON. Numbers that are not finite, for which JSON has no words, become null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def parse_json(text: str | bytes) -> Any:
    """Return the values in a JSON text.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply, repeats a key of an object, or holds a lone
            surrogate or an integer with more digits than Python reads.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        content = json.loads(text, object_pairs_hook=_object)
        # A lone surrogate can only come from an escape.
        if "\\u" in text:
            check_characters(json.dumps(content, ensure_ascii=False))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise ValueError for a key that occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(name)} occurs twice in one object")
    return found


class _Loader(yaml.SafeLoader):
    """Loads plain values; refuses a key that occurs twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for place in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name = self.construct_object(place, deep=True)
            if name in known:
                raise ValueError(f"line {place.start_mark.line + 1}: the key {shown(name)} occurs twice in one mapping")
            known.add(name)
        return super().construct_mapping(node, deep)


def check_characters(text: str, errors: str = "strict") -> None:
    """Raise ValueError if `text` holds a lone surrogate that the error handler `errors` does not encode."""
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise ValueError(f"expected Unicode characters, found the lone surrogate {text[error.start]!r}") from None


def parse_yaml(text: str) -> Any:
    """Return the plain values in a YAML text.

    Aliases are refused because a few lines with aliases can expand to any number of values.

    Raises:
        ValueError: the text is not YAML with plain values, is nested too deeply, uses aliases, repeats a key of a
            mapping, or holds a lone surrogate. The message is one line.
    """
    try:
        depth = 0
        # Events arrive one by one without recursion, so the depth is known before any value is built.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"aliases (*{event.anchor}) are not supported")
            if isinstance(event, yaml.ScalarEvent):
                # Some lone surrogates are allowed: they stand for bytes of paths that are not UTF-8.
                check_characters(event.value, "surrogateescape")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        return yaml.load(text, Loader=_Loader)
    # PyYAML also passes on the errors of Python's int, float and datetime.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(shortened(" ".join(str(error).split()), 400)) from None
