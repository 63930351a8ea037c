"""Convert checkpoints of official code into models of this library.

Inside: `convert`, `SOURCES`, `Source`.

Each source has a module with a function `read`, which builds a model from an `OfficialCheckpoint` and the vocabulary
size. The module maps the keys and options of the official code. File reading, encoder options, weights and error
messages are shared. To add a source, add a module next to `scan.py` and an entry in `SOURCES`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs

from itm_fast import config as settings
from itm_fast.compat import bfan, camp, chan, dbl, esa, laps, naaf, oscar, pfan, rcar, rvsepp, scan, sgraf, vse_infty
from itm_fast.compat.checkpoint import OfficialCheckpoint, read_checkpoint, read_state_dict
from itm_fast.data import BertVocabulary, Vocabulary
from itm_fast.files import atomic, regular
from itm_fast.files.messages import shortened
from itm_fast.files.run_files import CONFIG, VOCABULARY
from itm_fast.models.base import MatchingModel

__all__ = ["SOURCES", "Source", "convert"]


@attrs.frozen
class Source:
    """The official code that writes a kind of checkpoint.

    Attributes:
        read: function that builds a model from a checkpoint and the vocabulary size.
        has_mask: function that returns whether the official code added `<mask>` to the vocabulary of a checkpoint.
        bert: whether `read` takes the argument `bert_heads`.
        open: function that reads the file.
    """

    read: Callable[..., MatchingModel]
    has_mask: Callable[[OfficialCheckpoint], bool] = lambda _: False
    bert: bool = False
    open: Callable[..., OfficialCheckpoint] = read_checkpoint


SOURCES: Mapping[str, Source] = {
    "scan": Source(scan.read),
    "bfan": Source(bfan.read),
    "camp": Source(camp.read),
    "pfan": Source(pfan.read),
    "sgraf": Source(sgraf.read),
    "rcar": Source(rcar.read, has_mask=lambda _: True),
    "dbl": Source(dbl.read, has_mask=dbl.has_mask),
    "esa": Source(esa.read, has_mask=lambda _: True, bert=True),
    "naaf": Source(naaf.read),
    "chan": Source(chan.read, has_mask=lambda _: True, bert=True),
    "vse_infty": Source(vse_infty.read, has_mask=lambda _: True, bert=True),
    "rvsepp": Source(rvsepp.read, has_mask=lambda _: True, bert=True),
    "oscar": Source(oscar.read, bert=True, open=read_state_dict),
    "laps": Source(laps.read, bert=True),
}


def convert(
    source: str,
    checkpoint: str | os.PathLike[str],
    vocabulary: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    ignored_options: Iterable[str] = (),
    bert_heads: int | None = None,
) -> OfficialCheckpoint:
    """Convert an official checkpoint into a run directory for `itm_fast.models.load` and `itm-fast evaluate`.

    Args:
        source: the official code that wrote the checkpoint, one of `SOURCES`.
        checkpoint: the file, such as `model_best.pth.tar`. No code in it is executed.
        vocabulary: the vocabulary of the training: JSON, or `vocab.txt` or `tokenizer.json` of BERT. `out` gets a copy
            as JSON; `<mask>` is appended if the official code did so.
        out: the directory to write. It must not contain another model. Files of an interrupted conversion of the same
            checkpoint are replaced.
        ignored_options: names of unknown options that do not change scores. For all other unknown options the
            conversion warns.
        bert_heads: number of BERT's attention heads, at least 1, which a checkpoint does not contain. None: one per 64
            channels, as in all published BERT models.

    Returns:
        The checkpoint with its epoch, best sum of recalls and options.

    Raises:
        ValueError: a file is missing, damaged or contains code, or keys, shapes, values, options or the vocabulary size
            do not fit. The message names the file and the key. No file is written.
    """
    if source not in SOURCES:
        raise ValueError(settings.unknown_name("source", source, list(SOURCES)))
    more = {}
    if bert_heads is not None:
        if not SOURCES[source].bert:
            with_bert = ", ".join(name for name, one in SOURCES.items() if one.bert)
            raise ValueError(f"bert_heads: expected only for {with_bert}, got {bert_heads} for {source}")
        more = {"bert_heads": bert_heads}
    folder, vocabulary = Path(out), Path(vocabulary)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder for the model, found a file")
    if not regular.is_file(vocabulary):
        found = "expected a vocabulary file, found a folder" if vocabulary.is_dir() else "no such vocabulary file"
        raise ValueError(f"{vocabulary}: {found}")
    known = Vocabulary.from_file(vocabulary)
    official = SOURCES[source].open(checkpoint, ignored_options=ignored_options)
    words = known.with_mask() if SOURCES[source].has_mask(official) else known
    model = SOURCES[source].read(official, len(words), **more)
    for name in official.options.unknown():
        warnings.warn(
            f"{checkpoint}: opt.{shortened(name)}: unknown option, ignored because all weights fit {source}; check "
            f"that it does not change scores (--ignore-option {shortened(name)} silences this warning)",
            stacklevel=2,
        )
    reads_pieces = getattr(model.config, "text_encoder", None) == "bert"
    if reads_pieces != isinstance(words, BertVocabulary):
        kind = "vocab.txt or tokenizer.json of a BERT model" if reads_pieces else "a vocabulary of words"
        raise ValueError(f"{vocabulary}: expected {kind}, as in the training of the checkpoint")
    # Write the model's own files last: an interrupted conversion then leaves no loadable model.
    as_it_is = words is known and not isinstance(words, BertVocabulary)
    vocabulary_bytes = regular.read_bytes(vocabulary) if as_it_is else words.to_json().encode()
    contents = {VOCABULARY: vocabulary_bytes, **model.file_contents()}
    _check_contents(folder, contents)
    for name, content in contents.items():
        atomic.remove_temporaries(folder / name)
        atomic.write_bytes(folder / name, content)
    return official


def _check_contents(folder: Path, contents: Mapping[str, bytes]) -> None:
    if (folder / CONFIG).exists():
        raise ValueError(f"{folder}: holds {CONFIG}, the settings of a training run; choose another --out")
    for name, content in contents.items():
        path = folder / name
        same = regular.is_file(path) and path.stat().st_size == len(content) and path.read_bytes() == content
        if path.exists() and not same:
            raise ValueError(f"{folder}: holds another {name}, which the model would overwrite; choose another --out")
