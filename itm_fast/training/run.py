"""Run a training from its configuration: load the data, create the model, train.

Inside: `train`, `load_data`, `vocabulary_path`, `warn_of_unknown_words`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary, check_data, find_vocabulary, load_vocabulary, open_split
from itm_fast.data.tokenizer_vocabulary import TOKENIZER_FILE
from itm_fast.data.vocabulary import MAX_UNKNOWN_SHARE, check_min_count
from itm_fast.distributed import World, joined
from itm_fast.evaluation import Gallery
from itm_fast.files import regular
from itm_fast.files.processors import check_count, device_of, set_threads
from itm_fast.models.bert_folder import bert_vocabulary_file
from itm_fast.models.clip_folder import read_clip_tokenizer
from itm_fast.training import run_folder
from itm_fast.training.backbone import check_towers, set_checkpointing
from itm_fast.training.cautions import cautions, few_images
from itm_fast.training.config import TrainConfig
from itm_fast.training.creation import check_regions, create_model
from itm_fast.training.lock import lock
from itm_fast.training.loss_rules import RIVALS, described_boosting
from itm_fast.training.own import uncompiled
from itm_fast.training.progress import TrainResult
from itm_fast.training.scenarios import AddrScenario, frozen_anchor, kept_share
from itm_fast.training.start import start_vocabulary
from itm_fast.training.trainer import Trainer

__all__ = ["load_data", "train", "vocabulary_path", "warn_of_unknown_words"]


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    progress: bool = True,
    model: nn.Module | None = None,
    train_data: Gallery | None = None,
    validation_data: Gallery | None = None,
    loss: Callable[..., Tensor] | None = None,
) -> TrainResult:
    """Train a model and save it in the run directory `config.out`, in all processes of a launcher.

    Args:
        config: the settings of the run.
        resume: continue the run in `config.out` from its last state.
        progress: print a summary, a progress bar if there is a terminal, and a line per validation.
        model: trained instead of the one that `config.model` names: any module with the methods `encode_images`,
            `encode_captions` and `score` of `itm_fast.models.MatchingModel`. Its weights are saved as
            `model.safetensors`, under the names of its `state_dict`.
        train_data, validation_data: data sets instead of those in `config.data`: any `itm_fast.evaluation.Gallery`. A
            method `batch(caption_indices)`, if there is one, returns the `itm_fast.data.Batch` of a training step.
            They need a `model`.
        loss: a function or module that maps the scores (B, B), images in rows and matching pairs on the diagonal, to a
            scalar, in all epochs. A parameter `positives` receives a mask (B, B) of further pairs that are no
            negatives, or None. The scenarios aoq, meta_spn and ncr have their own losses and take none.

    Returns:
        The result of the run. After Ctrl-C (SIGINT) or SIGTERM, the state is saved and `finished` is False; `best` is
        then empty if there was no validation yet. `resume` continues the run.

    Raises:
        TypeError: `model` or a data set lacks a method.
        ValueError: a setting, the data or the content of the run directory does not fit, or another process trains
            there. Nothing is written.
        OSError: the disk is full. Earlier saves are kept, and `resume` continues from them.
    """
    config = run_folder.with_saved_defaults(config) if resume else config
    set_threads(config.threads)
    check_count("workers", config.workers)
    with joined(config.device) as world, contextlib.ExitStack() as kept:
        with world.together():
            device_of(world.device(config.device))
            if world.first:
                run_folder.check(config, resume=resume)
        with world.together():
            vocabulary, trainer = _trainer(
                config, world, model, (train_data, validation_data), loss, resume=resume, progress=progress
            )
        with world.together():
            if world.first:
                kept.enter_context(lock(config.out))
                # Another training may have come and gone since the first look.
                run_folder.check(config, resume=resume)
        with world.together():
            if resume:
                trainer.restore()
        with world.together():
            if world.first:
                _open(trainer, vocabulary, resume=resume, progress=progress)
        return trainer.run()


def _trainer(
    config: TrainConfig,
    world: World,
    model: nn.Module | None,
    splits: tuple[Gallery | None, Gallery | None],
    loss: Callable[..., Tensor] | None,
    *,
    resume: bool,
    progress: bool,
) -> tuple[Vocabulary | None, Trainer]:
    """Create the trainer of a run, and return the vocabulary, too; None if the data are not in `config.data`."""
    vocabulary, anchor = None, None
    train_data, validation_data = splits
    model = None if model is None else uncompiled(model)
    if isinstance(model, models.MatchingModel):
        check_towers(config, model)
        set_checkpointing(config, model)
    if model is not None and config.start is not None:
        raise ValueError("start: expected none with your own model, whose weights are those to start from")
    # Trainers agree on where features lie: all processes make one, or none does.
    with world.together():
        if train_data is None and validation_data is None:
            vocabulary, train_data, validation_data = load_data(config, resume=resume)
            torch.manual_seed(config.seed)
            if model is None:
                model = create_model(config, vocabulary, train_data)
            if isinstance(model, models.MatchingModel):
                for data in (train_data, validation_data):
                    check_regions(model, data)
                    data.check_caption_lengths(model.max_caption_length)
                    model.prepare(data)
        elif config.noise:
            raise ValueError(
                "noise: expected 0 with your own data sets; CaptionDataset.shuffle_captions shuffles their captions"
            )
        if train_data is None or validation_data is None:
            raise ValueError("train_data, validation_data: expected both or none")
        if model is None:
            raise ValueError("model: expected a module to train with train_data and validation_data")
        words = getattr(train_data, "vocabulary", None)
        _check_same_words(model, words)
        if isinstance(model, models.MatchingModel) and isinstance(words, Vocabulary):
            anchor = frozen_anchor(config, model, words, resume=resume)
    if vocabulary is None:
        torch.manual_seed(config.seed)
    trainer = Trainer(
        config, model, train_data, validation_data, loss=loss, anchor=anchor, progress=progress, world=world
    )
    return vocabulary, trainer


def _check_same_words(model: nn.Module, vocabulary: object) -> None:
    """Raise ValueError if the model was trained with other words than those of the data: their ids differ."""
    own = model.tokenizer if isinstance(model, models.MatchingModel) else None
    if own is not None and isinstance(vocabulary, Vocabulary) and own != vocabulary:
        raise ValueError(
            f"vocab: the model was trained with a vocabulary of {len(own):,} words, which is not that of the data "
            f"({len(vocabulary):,} words); give the model's own, such as RUN/{run_folder.VOCABULARY}"
        )


def _open(trainer: Trainer, vocabulary: Vocabulary | None, *, resume: bool, progress: bool) -> None:
    """Prepare the run directory and print a summary."""
    config = trainer.config
    run = run_folder.prepare(config, resume=resume)
    path = None if vocabulary is None else vocabulary_path(config, resume=resume)
    if not resume:
        _check_words(trainer, built=path is None)
    for caution in cautions(config, trainer.model):
        warnings.warn(caution, stacklevel=2)
    few = few_images({trainer.validation_data.split: trainer.validation_data.n_images})
    if few is not None and not resume:
        warnings.warn(few, stacklevel=2)
    if progress:
        tqdm.write("\n".join(_opening(trainer, vocabulary, path or "built from the training captions")))
    words = vocabulary or trainer.vocabulary
    if words is not None:
        words.save(run / run_folder.VOCABULARY)


def _check_words(trainer: Trainer, *, built: bool) -> None:
    """Warn of words that the vocabulary lacks; `built`: from the training captions."""
    splits = [data for data in (trainer.train_data, trainer.validation_data) if isinstance(data, PrecomputedDataset)]
    if built and isinstance(trainer.train_data, PrecomputedDataset):
        trainer.train_data.warn_of_rare_words(trainer.config.min_count)
        if trainer.train_data.unknown_share > MAX_UNKNOWN_SHARE:
            return  # That warning explains unknown words of the other split, too.
    for data in splits:
        warn_of_unknown_words(data)


def load_data(
    config: TrainConfig, *, resume: bool = False
) -> tuple[Vocabulary, PrecomputedDataset, PrecomputedDataset]:
    """Load the vocabulary, the training split and the validation split. A resumed run keeps its vocabulary."""
    if config.data is None:
        raise ValueError("data: this setting is required")
    check_data(config.data, "train")
    path = vocabulary_path(config, resume=resume)
    default = settings.fields_of(TrainConfig)["min_count"].default
    if not resume and config.min_count != default:
        check_min_count(config.min_count, path)
    if config.clip is not None and path == Path(config.clip) / TOKENIZER_FILE:
        vocabulary: Vocabulary = read_clip_tokenizer(config.clip)
    else:
        vocabulary = load_vocabulary(config.data, path, min_count=config.min_count)
    if config.text_augmentation:
        # The vocabularies published with SCAN have no <mask>; the run keeps the one that it trained with.
        vocabulary = vocabulary.with_mask()
    train_data = open_split(config.data, "train", vocabulary)
    if config.noise:
        train_data.shuffle_captions(config.noise, config.seed)
    validation_data = open_split(config.data, config.validation_split, vocabulary, max_images=config.validation_images)
    shapes = [data.features.shape[1:] for data in (train_data, validation_data)]
    # With counts, the number of regions is that of the longest set, which may differ.
    counted = any(data.source.counts is not None for data in (train_data, validation_data))
    if shapes[0][1] != shapes[1][1] or (shapes[0] != shapes[1] and not counted):
        raise ValueError(
            f"{config.data}: images of {shapes[0]} values in train, but of {shapes[1]} in {config.validation_split}"
        )
    return vocabulary, train_data, validation_data


def vocabulary_path(config: TrainConfig, *, resume: bool = False) -> Path | None:
    """Return the vocabulary file for `load_data`; None if the vocabulary is built from the training captions."""
    own = Path(config.out) / run_folder.VOCABULARY
    if resume and regular.is_present(own):
        return own
    if config.bert is not None:
        if config.vocab is not None:
            raise ValueError(f"vocab: the BERT model in {config.bert} contains its own vocabulary; expected no other")
        return bert_vocabulary_file(config.bert)
    if config.clip is not None:
        if config.vocab is not None:
            raise ValueError(f"vocab: the model in {config.clip} contains its own tokenizer; expected no other")
        return Path(config.clip) / TOKENIZER_FILE
    of_start = start_vocabulary(config)
    if of_start is not None:
        return of_start
    if config.vocab is not None:
        return Path(config.vocab)
    return None if config.data is None else find_vocabulary(config.data)


def _opening(trainer: Trainer, vocabulary: Vocabulary | None, vocabulary_source: Path | str) -> Iterator[str]:
    """Yield the lines of the summary."""
    config = trainer.config
    sizes = [
        f"{data.split} {data.n_images:,} images, {len(data):,} captions"
        for data in (trainer.train_data, trainer.validation_data)
    ]
    where = [config.data] if config.data is not None and vocabulary is not None else []
    yield f"data: {': '.join([*where, '; '.join(sizes)])}"
    if trainer.placement is not None:
        yield f"features: {trainer.placement}"
    if vocabulary is not None:
        yield f"vocabulary: {vocabulary_source}, {len(vocabulary):,} words"
    yield f"device: {trainer.device}, threads: {torch.get_num_threads()}, precision: {config.precision}"
    if config.start is not None:
        yield f"start: {config.start}"
    if trainer.world.size > 1:
        yield f"processes: {trainer.world.size}, which share each batch of {config.batch_size:,}"
    if trainer.random_note:
        yield trainer.random_note
    yield f"epochs: {config.epochs:,}, steps per epoch: {trainer.steps_per_epoch:,}"
    yield f"loss: {trainer.described_loss}"
    if config.scenario == "addr":
        yield f"scenario: addr, {config.addr or 'full'}"
        if isinstance(trainer.stepper.scenario, AddrScenario):
            yield f"discriminators: {trainer.stepper.scenario.placement}"
    elif config.scenario in RIVALS:
        yield f"scenario: {config.scenario}"
    elif config.scenario != "single":
        yield f"scenario: {config.scenario}, boosting: {described_boosting(config)}"
    if config.scenario == "mss":
        share = kept_share(config.epochs * trainer.steps_per_epoch, config.ema_decay)
        yield f"moving average: keeps {share:.3g} of its first weights to the end"


def warn_of_unknown_words(data: PrecomputedDataset) -> None:
    """Warn if most words of the captions are unknown, as with a vocabulary of other data."""
    if data.unknown_share > MAX_UNKNOWN_SHARE:
        warnings.warn(
            f"{data.directory}: the vocabulary lacks {data.unknown_share:.0%} of the words in the captions of "
            f"{data.split}; is it that of other data, or built with a high --min-count?",
            stacklevel=2,
        )
