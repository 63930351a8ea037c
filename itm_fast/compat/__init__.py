"""Importers of checkpoints that published code wrote: one file per source.

Inside: `convert`, `SOURCES`, `Source`.

A source has a function from an `OfficialCheckpoint` and the size of its vocabulary to one of `itm_fast.models`. It
names the keys and the options of that code; reading files, the options of the encoders, weights and error messages are
shared. A new source is one file beside `scan.py` and its line in `SOURCES`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs

from itm_fast import config as settings
from itm_fast.compat import dbl, rcar, rvsepp, scan, sgraf, vse_infty
from itm_fast.compat.checkpoint import OfficialCheckpoint, read_checkpoint
from itm_fast.data import BertVocabulary, Vocabulary
from itm_fast.files import atomic, regular
from itm_fast.files.messages import shortened
from itm_fast.files.run_files import CONFIG, VOCABULARY
from itm_fast.models.base import MatchingModel

__all__ = ["SOURCES", "Source", "convert"]


@attrs.frozen
class Source:
    """Published code: how its checkpoints are read, and whether it had added `<mask>` to the vocabulary of one.

    With `bert` the reader takes the setting `bert_heads`.
    """

    read: Callable[..., MatchingModel]
    has_mask: Callable[[OfficialCheckpoint], bool] = lambda _: False
    bert: bool = False


SOURCES: Mapping[str, Source] = {
    "scan": Source(scan.read),
    "sgraf": Source(sgraf.read),
    "rcar": Source(rcar.read, has_mask=lambda _: True),
    "dbl": Source(dbl.read, has_mask=dbl.has_mask),
    "vse_infty": Source(vse_infty.read, has_mask=lambda _: True, bert=True),
    "rvsepp": Source(rvsepp.read, has_mask=lambda _: True, bert=True),
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
    """Converts an official checkpoint into a RUN folder that `itm_fast.models.load` and `itm-fast evaluate` take.

    Args:
        source: the published code that wrote it, one of `SOURCES`.
        checkpoint: its file, such as `model_best.pth.tar`; nothing in it is executed.
        vocabulary: the vocabulary JSON it was trained with, or `vocab.txt` or `tokenizer.json` of BERT; `out` gets it
            as JSON, with `<mask>` behind its words where the published code put it there.
        out: the folder to write; it must not hold another model. What a conversion of the same files that was killed
            left there is no hindrance.
        ignored_options: names of unknown options of the checkpoint that do not change its scores; of others the
            conversion warns.
        bert_heads: attention heads of the checkpoint's BERT, at least 1, where they are not the published ones of its
            width (64 channels a head): neither weights nor options tell them.

    Returns:
        What the checkpoint holds beside the weights: epoch, best sum of recalls, options.

    Raises:
        ValueError: a file is missing, damaged or holds code; keys, shapes, values, options or the size of the
            vocabulary do not fit. One line names the file and the key. Nothing is written then.
    """
    if source not in SOURCES:
        raise ValueError(settings.unknown_name("source", source, list(SOURCES)))
    more = {}
    if bert_heads is not None:
        if not SOURCES[source].bert:
            raise ValueError(f"bert_heads: {bert_heads} goes with the source vse_infty or rvsepp, not {source}")
        more = {"bert_heads": bert_heads}
    folder, vocabulary = Path(out), Path(vocabulary)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder for the model, found a file")
    if not regular.is_file(vocabulary):
        raise ValueError(f"{vocabulary}: no such vocabulary file")
    known = Vocabulary.from_file(vocabulary)
    official = read_checkpoint(checkpoint, ignored_options=ignored_options)
    words = known.with_mask() if SOURCES[source].has_mask(official) else known
    model = SOURCES[source].read(official, len(words), **more)
    for name in official.options.unknown():
        warnings.warn(
            f"{checkpoint}: opt.{shortened(name)}: unknown option, ignored because all weights fit {source}; check "
            f"that it does not change scores (--ignore-option {shortened(name)} silences this warning)",
            stacklevel=2,
        )
    with_bert = getattr(model.config, "text_encoder", None) == "bert"
    if with_bert != isinstance(words, BertVocabulary):
        kind = "vocab.txt or tokenizer.json of a BERT model" if with_bert else "a vocabulary of words"
        raise ValueError(f"{vocabulary}: expected {kind}, by which the checkpoint reads captions")
    # The model's own files come last: until they are whole the folder is no saved model.
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
