"""BERT as text encoder: word pieces, equations, training, saving, and rejected input."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer

from itm_fast import cli, compat, models
from itm_fast.data import BertVocabulary, TextAugmentation, Vocabulary
from itm_fast.models.bert_folder import bert_vocabulary_file
from itm_fast.training.branch import Branch
from itm_fast.training.checkpoint import load_state
from python_tests.helpers.bert import PIECES, bert_states, random_bert, write_bert
from python_tests.helpers.conversions import converted, refused
from python_tests.helpers.official_scan import write_checkpoint, write_vocabulary
from python_tests.helpers.official_vse_infty import official_scores, options, random_model, rvsepp_options
from python_tests.helpers.pooling import pooled
from python_tests.helpers.runs import config, make_trainer, run, same, weights

PAD, UNK, CLS, SEP, MASK = range(5)
BERT = {
    "text_encoder": "bert", "bert_dim": 24, "bert_layers": 2, "bert_heads": 12, "bert_hidden_dim": 20,
    "bert_max_length": 16,
}  # fmt: skip
MODEL = {"vocab_size": len(PIECES), "feature_dim": 6, "embed_dim": 8, **BERT}
IDS = torch.tensor([[2, 11, 5, 6, 3], [2, 3, 0, 0, 0], [2, 8, 9, 10, 3]])
LENGTHS = torch.tensor([5, 2, 4])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "bert")


# Word pieces


@pytest.mark.parametrize(
    ("caption", "pieces"),
    [
        ("red boat", "[CLS] red bo ##at [SEP]"),
        ("A Réd DOG,boat", "[CLS] [UNK] red d ##o ##g , bo ##at [SEP]"),
        ("fish hats", "[CLS] [UNK] [UNK] [SEP]"),
        ("", "[CLS] [SEP]"),
    ],
)
def test_captions_are_cut_as_bert_cuts_them(folder: Path, caption: str, pieces: str) -> None:
    vocabulary = Vocabulary.from_file(folder / "vocab.txt")
    assert isinstance(vocabulary, BertVocabulary)
    assert vocabulary.encode(caption) == [PIECES.index(piece) for piece in pieces.split()]
    assert vocabulary.decode(vocabulary.encode(caption)) == pieces.split()[1:-1]
    assert vocabulary.pieces(caption) == pieces.split()


def test_case_is_kept_where_the_folder_says_so(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 512}')
    vocabulary = Vocabulary.from_file(folder / "vocab.txt")
    assert vocabulary.encode("red RED") == [CLS, PIECES.index("red"), UNK, SEP]
    again = BertVocabulary(PIECES)
    assert (again == vocabulary, again == Vocabulary.from_file(folder / "vocab.txt")) == (False, False)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": "no"}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: expected a JSON object whose do_lower_case is"):
        Vocabulary.from_file(folder / "vocab.txt")
    (folder / "tokenizer_config.json").unlink()
    assert again == Vocabulary.from_file(folder / "vocab.txt")
    text = (folder / "vocab.txt").read_bytes()
    (folder / "vocab.txt").write_bytes(text.replace(b"\n", b"\r\n"))
    assert again == Vocabulary.from_file(folder / "vocab.txt"), "as Windows ends lines"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"strip_accents": false}', "strip_accents: expected True, got False"),
        ('{"do_lower_case": false, "strip_accents": true}', "strip_accents: expected False, got True"),
        ('{"tokenize_chinese_chars": false}', "tokenize_chinese_chars: expected True, got False"),
        ('{"do_lower_case": true, "strip_accents": null, "tokenize_chinese_chars": true}', None),
    ],
)
def test_tokenizers_that_cut_otherwise_are_refused(folder: Path, settings: str, message: str | None) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(settings)
    if message is None:
        assert Vocabulary.from_file(folder / "vocab.txt") == BertVocabulary(PIECES)
        return
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        Vocabulary.from_file(folder / "vocab.txt")
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_as_transformers_writes_it(tmp_path: Path, lowercase: bool) -> None:
    """Version 5 of transformers writes only `tokenizer.json`. The ids equal those of the tokenizers package."""
    path = tmp_path / "tokenizer.json"
    own = BertWordPieceTokenizer(vocab={piece: index for index, piece in enumerate(PIECES)}, lowercase=lowercase)
    own.save(str(path))
    assert bert_vocabulary_file(tmp_path) == path
    vocabulary = Vocabulary.from_file(path)
    assert vocabulary == BertVocabulary(PIECES, lowercase=lowercase)
    for caption in ("red boat", "A Réd DOG,boat", "fish hats", ""):
        assert vocabulary.encode(caption) == Tokenizer.from_file(str(path)).encode(caption).ids, caption
    (tmp_path / "vocab.txt").touch()
    assert bert_vocabulary_file(tmp_path) == tmp_path / "vocab.txt"


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("model", {"type": "BPE"}, "tokenizer: model.type: expected 'WordPiece' as BERT has it, got 'BPE'"),
        ("model", {"vocab": {"[PAD]": 1}}, "vocabulary: expected the ids 0 to 0, no word has id 0"),
        ("model", {"vocab": 7}, "vocabulary: expected a JSON object with an object 'model.vocab'"),
        ("normalizer", {"lowercase": 1}, "tokenizer: normalizer.lowercase: expected true or false, got 1"),
        ("normalizer", {"strip_accents": False},
         "tokenizer: normalizer.strip_accents: expected True as lowercase, got False"),
        ("normalizer", None, "tokenizer: normalizer.type: expected 'BertNormalizer' as BERT has it, got None"),
        ("added_tokens", [{"id": 99, "content": "<new>"}],
         "tokenizer: added_tokens: expected only pieces of model.vocab, got '<new>'"),
        ("added_tokens", 5, "tokenizer: added_tokens: expected a list, got 5"),
    ],
)  # fmt: skip
def test_tokenizers_that_do_not_fit(tmp_path: Path, part: str, changes: object, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    BertWordPieceTokenizer(vocab={piece: index for index, piece in enumerate(PIECES)}).save(str(path))
    content = json.loads(path.read_text())
    content[part] = {**content[part], **changes} if isinstance(changes, dict) else changes
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        Vocabulary.from_file(path)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize("lowercase", [True, False])
def test_vocabularies_are_saved_and_read(tmp_path: Path, lowercase: bool) -> None:
    vocabulary = BertVocabulary(PIECES, lowercase=lowercase)
    vocabulary.save(tmp_path / "vocab.json")
    again = Vocabulary.from_file(tmp_path / "vocab.json")
    assert again == vocabulary
    assert again.encode("Red boat") == vocabulary.encode("Red boat")
    assert (again.pad, again.start, again.end, again.unk, again.mask) == (PAD, CLS, SEP, UNK, MASK)
    assert again.with_mask() is again
    assert [PIECES[index] for index in again.continuations] == ["##at", "##o", "##g"]
    assert again != Vocabulary(["<pad>", "<start>", "<end>", "<unk>"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "bert", "lowercase": 1, "word2idx": {}}', "vocabulary: expected lowercase to be true or false"),
        ('{"kind": ["bert"], "word2idx": {}}', "vocabulary: expected the kind bert or tokenizer, got ['bert']"),
        ('{"kind": "gpt", "word2idx": {}}', "vocabulary: expected the kind bert or tokenizer, got 'gpt'"),
        ('{"kind": "bert", "lowercase": true, "word2idx": {"a": 0}}',
         "vocabulary: expected the words [PAD] [CLS] [SEP] [UNK], found no [PAD] [CLS] [SEP] [UNK]"),
        ('{"kind": "bert", "lowercase": true, "word2idx": {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}}',
         "vocabulary: expected the piece [MASK], found none"),
    ],
)  # fmt: skip
def test_damaged_vocabularies(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        Vocabulary.from_file(path)
    assert str(error.value) == f"{path}: {message}"


def test_pieces_of_a_word_change_together() -> None:
    """Augment "boat red" 20,000 times. The number of remaining pieces tells how the word "boat" was changed."""
    vocabulary = BertVocabulary([*PIECES, *(f"word{index}" for index in range(500))])
    boat, red = [PIECES.index("bo"), PIECES.index("##at")], PIECES.index("red")
    row = [CLS, *boat, red, SEP]
    ids, lengths = TextAugmentation(vocabulary, 0.4)(
        torch.tensor([row] * 20000), torch.full((20000,), 5), torch.Generator().manual_seed(0)
    )
    counts: Counter[str] = Counter()
    for changed, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        left = changed[1 : length - 1]
        assert len(left) in (1, 2, 3)
        if len(left) == 1:
            counts["deleted"] += 1
        elif MASK in left[:2]:
            assert left[:2] == [MASK, MASK]
            counts["masked"] += 1
        else:
            assert not {PAD, UNK, CLS, SEP} & set(left[:2])
            same = [one == other for one, other in zip(left, boat, strict=False)]
            counts["kept" if all(same) else "half" if any(same) else "replaced"] += 1
    # A random piece may equal the original one by chance.
    assert counts.pop("half", 0) < 20
    shares = {change: count / 20000 for change, count in counts.items()}
    both = 0.16 * 0.16  # If both words would be deleted, both are kept.
    wanted = {"kept": 0.6 + both, "masked": 0.2, "replaced": 0.04, "deleted": 0.16 - both}
    # The standard deviation of a share is at most 0.0035.
    assert shares == pytest.approx(wanted, abs=0.014)


# The encoder


def test_states_equal_the_equations() -> None:
    torch.manual_seed(0)
    model = models.create("vse_infty", **MODEL).eval()
    own = random_bert()
    model.text_encoder.bert.load_state_dict(own)
    exact = models.create("vse_infty", **MODEL).double().eval()
    exact.load_state_dict(model.state_dict())
    fc = exact.text_encoder.fc
    expected = []
    for ids, length in zip(IDS.tolist(), LENGTHS.tolist(), strict=True):
        rows = torch.from_numpy(bert_states(own, ids[:length])) @ fc.weight.T + fc.bias
        caption = pooled(exact.text_pool, rows)
        expected.append(caption / (caption.norm() + 1e-8))
    found = model.encode_captions(IDS, LENGTHS)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=0, atol=5e-6)
    torch.testing.assert_close(exact.encode_captions(IDS, LENGTHS), torch.stack(expected), rtol=1e-9, atol=1e-11)
    wide = torch.cat([IDS, torch.zeros(3, 9, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model.encode_captions(wide, LENGTHS), found, rtol=0, atol=1e-6)
    one = torch.cat([model.encode_captions(IDS[i : i + 1], LENGTHS[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(one, found, rtol=0, atol=1e-6)


def test_captions_without_words_are_zero_under_the_mean() -> None:
    model = models.create("vsepp", **MODEL, text_pooling="mean")
    found = model.encode_captions(IDS, torch.tensor([0, 2, 5]))
    assert found[0].tolist() == [0.0] * 8
    found.sum().backward()
    assert all(bool(one.grad.isfinite().all()) for one in model.text_encoder.parameters())
    assert model.encode_captions(IDS[:, :0], torch.tensor([0, 0, 0])).tolist() == [[0.0] * 8] * 3


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(
        ValueError, match="text_pooling: expected mean, gpo or esa where BERT reads the captions, got last"
    ):
        models.create("vsepp", **MODEL)
    with pytest.raises(ValueError, match="bert_dim: expected a multiple of the 5 heads, got 24"):
        models.create("vse_infty", **{**MODEL, "bert_heads": 5})
    model = models.create("vse_infty", **MODEL)
    with pytest.raises(ValueError, match="token_ids: expected at most 16 tokens in a caption, got 17"):
        model.encode_captions(torch.zeros(1, 17, dtype=torch.int64), torch.tensor([17]))
    with pytest.raises(ValueError, match=f"token_ids: expected ids from 0 to {len(PIECES) - 1}, got 0 to 99"):
        model.encode_captions(torch.tensor([[0, 99]]), torch.tensor([2]))


# Training


def test_a_training_with_bert(data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train from a BERT folder. The saved run does not need the folder, and --resume gives the same as one run."""
    settings = config(
        data, tmp_path / "whole", model="vse_infty", bert=str(folder), text_augmentation=0.2, text_lr_factor=0.5
    )
    trainer = make_trainer(settings)
    start = trainer.model.state_dict()
    for name, weight in random_bert().items():
        assert torch.equal(start[f"text_encoder.bert.{name}"], weight), name
    groups = Branch(settings, trainer.model, 4).optimizer.param_groups
    assert [group["lr"] for group in groups] == [2e-3, 1e-3]
    bert = list(trainer.model.text_encoder.bert.parameters())
    assert {id(one) for one in groups[1]["params"]} == {id(one) for one in bert}
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))

    run(settings)
    assert load_state(tmp_path / "whole")["optimizer"]["param_groups"][1]["initial_lr"] == 1e-3
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    moved = shutil.move(folder, tmp_path / "elsewhere")
    torch.manual_seed(99)
    assert run(attrs.evolve(parts, epochs=2, bert=str(moved)), resume=True).steps == 8
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    shutil.rmtree(moved)
    assert cli.run(["evaluate", "--checkpoint", str(tmp_path / "parts"), "--data", str(data)]) == 0
    assert isinstance(Vocabulary.from_file(tmp_path / "parts" / "vocab.json"), BertVocabulary)
    capsys.readouterr()


def test_a_resumed_run_keeps_its_heads(data: Path, folder: Path, tmp_path: Path) -> None:
    """The number of heads changes the scores but no weight shape, so the resumed run compares it."""
    settings = config(data, tmp_path / "run", model="vse_infty", bert=str(folder), epochs=1)
    run(settings)
    other = write_bert(tmp_path / "other", num_attention_heads=6)
    with pytest.raises(ValueError, match=r"^config\.json of the BERT model: its content is not what the run to resume"):
        run(attrs.evolve(settings, bert=str(other), epochs=2), resume=True)


def test_captions_that_bert_cannot_read_are_found_at_the_start(
    data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most 14 pieces fit, next to [CLS] and [SEP]."""
    data = shutil.copytree(data, tmp_path / "data")
    train = ["train", "--data", data, "--model", "vse_infty", "--bert", folder, "--epochs", "1", "--out"]
    evaluate = ["evaluate", "--data", data, "--checkpoint", tmp_path / "run"]
    files = {split: data / f"{split}_caps.txt" for split in ("train", "dev", "test")}
    for path in files.values():
        path.write_text("\n".join(["red " * 14, *path.read_text().splitlines()[1:]]) + "\n")
    for command in ([*train, tmp_path / "run", "--model-option", "embed_dim=8"], evaluate):
        assert cli.run([str(argument) for argument in command]) == 0
    for split, path in files.items():
        captions = path.read_text()
        path.write_text("red " + captions)
        command = evaluate if split == "test" else [*train, tmp_path / "refused"]
        found = f"got 17: {('red ' * 15).strip()!r}; shorten it or leave it out"
        assert error_of(capsys, *command) == (
            f"{path}: line 1: expected at most 16 tokens in a caption, as many as the model reads, {found}"
        )
        path.write_text(captions)
    assert not (tmp_path / "refused").exists()


def test_branches_that_train_together_start_from_the_same_bert(data: Path, folder: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", model="rvsepp", bert=str(folder), scenario="oss", branches=3, epochs=1)
    branches = [branch.model for branch in make_trainer(settings).stepper.scenario.branches]
    assert len(branches) == 3
    for name, weight in random_bert().items():
        assert all(torch.equal(one.text_encoder.bert.state_dict()[name], weight) for one in branches), name
    assert not torch.equal(branches[0].text_encoder.fc.weight, branches[1].text_encoder.fc.weight)
    assert run(settings).finished


def test_bert_learns(data: Path, folder: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", model="vse_infty", bert=str(folder), epochs=10, lr=1e-2)
    assert run(settings).best["rsum"] > 250, "untrained it is near 160: 1, 5 and 10 of 10 pictures or 50 captions"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err.removeprefix("itm-fast: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vsrn", "--bert", "BERT"], "bert: the model vsrn cannot read captions with BERT"),
        (["--model", "vse_infty", "--model-option", "text_encoder=bert"],
         "bert: text_encoder bert needs the folder of a BERT model: --bert DIR"),
        (["--model", "vse_infty", "--bert", "BERT", "--model-option", "bert_layers=3"],
         "model_options: bert_layers: expected 2 with the BERT in BERT, got 3"),
        (["--model", "vse_infty", "--bert", "BERT", "--vocab", "v.json"],
         "vocab: the BERT model in BERT contains its own vocabulary; expected no other"),
        (["--model", "vse_infty", "--bert", "nowhere"],
         "nowhere: no such folder; --bert needs a local folder of a BERT model, as nothing is downloaded: write one "
         "with save_pretrained of a BertModel and its tokenizer in transformers"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_bert(
    data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [str(folder) if one == "BERT" else one for one in arguments]
    found = error_of(capsys, "train", "--data", data, "--out", tmp_path / "run", *given)
    assert found == message.replace("BERT in BERT", f"BERT in {folder}").replace("model in BERT", f"model in {folder}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "config.json: model_type: expected bert, got 'roberta'"),
        ({"hidden_act": "relu"}, "config.json: hidden_act: expected gelu, got 'relu'"),
        ({"is_decoder": True}, "config.json: is_decoder: expected False, got True"),
        ({"vocab_size": 9}, f"config.json: vocab_size: expected {len(PIECES)} as in the vocabulary, got 9"),
        ({"hidden_size": 36}, "model.safetensors: embeddings.word_embeddings.weight: expected shape "
         f"({len(PIECES)}, 36), got ({len(PIECES)}, 24)"),
        ({"num_hidden_layers": 3}, "model.safetensors: the weight encoder.layer.2.attention.self.query.weight is "
         "missing"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    folder = write_bert(tmp_path / "bert", **changes)
    if "model_type" in changes:
        # Folders of other models may lack a vocabulary.
        (folder / "vocab.txt").unlink()
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--model", "vse_infty", "--bert", folder]
    assert error_of(capsys, *arguments) == f"{folder}/{message}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["vocab.txt", "config.json", "model.safetensors"])
def test_missing_files_of_the_folder(
    data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / name).unlink()
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--model", "vse_infty", "--bert", folder]
    assert error_of(capsys, *arguments).startswith(f"{folder}/{name}: no such ")


def test_without_transformers_one_line_says_what_to_install(
    data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models.create("vse_infty", **MODEL).save(tmp_path / "saved")
    for name in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    wanted = "bert: the package transformers is not installed; install it with pip install 'itm_fast[bert]'"
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--model", "vse_infty", "--bert", folder]
    assert error_of(capsys, *arguments) == wanted
    with pytest.raises(ValueError, match=r"saved/config\.json: bert: the package transformers is not installed"):
        models.load(tmp_path / "saved")
    models.create("vse_infty", vocab_size=9)


# Official checkpoints


# Weights of 24 channels do not show the number of heads: one for up to 64 channels, as published, by default.
@pytest.mark.parametrize(
    ("source", "make", "given", "heads"), [("vse_infty", options, None, 1), ("rvsepp", rvsepp_options, 12, 12)]
)
def test_official_checkpoints_with_bert_give_the_official_scores(
    folder: Path, tmp_path: Path, source: str, make: object, given: int | None, heads: int
) -> None:
    opt = make(vocab_size=len(PIECES))
    image, text = random_model(opt)
    random = torch.Generator().manual_seed(7)
    own = random_bert()
    pool = {name: weight for name, weight in text.items() if name.startswith("gpool.")}
    linear = {"linear.weight": torch.randn(8, 24, generator=random), "linear.bias": torch.randn(8, generator=random)}
    unused = {"bert.pooler.dense.weight": torch.ones(24, 24), "bert.embeddings.position_ids": torch.arange(16)[None]}
    text = {**{f"bert.{name}": weight for name, weight in own.items()}, **unused, **linear, **pool}
    path = write_checkpoint(tmp_path / "model_best.pth", [image, text], opt)
    compat.convert(source, path, folder / "vocab.txt", tmp_path / "run", bert_heads=given)
    captions = ["red boat", "dog", "sun , fish hat cup", "car"]
    features = np.random.default_rng(1).standard_normal((3, 11, 6)).astype(np.float32)
    vocabulary = Vocabulary.from_file(tmp_path / "run" / "vocab.json")
    states = [bert_states(own, vocabulary.encode(caption), heads) for caption in captions]
    expected = official_scores([image, text], opt, features, states=states)
    assert expected.std() > 1e-2, "scores that tell pairs apart"
    np.testing.assert_allclose(converted(tmp_path / "run", features, captions), expected, rtol=0, atol=1e-5)
    words = tmp_path / "words.json"
    Vocabulary(["<pad>", "<start>", "<end>", "<unk>", "<mask>", *PIECES[5:]]).save(words)
    path = write_checkpoint(tmp_path / "other.pth", [image, text], opt)
    with pytest.raises(
        ValueError, match=r"words\.json: expected vocab\.txt or tokenizer\.json of a BERT model, as in the training"
    ):
        compat.convert(source, path, words, tmp_path / "other")
    del text["bert.encoder.layer.1.output.dense.bias"]
    message = refused(tmp_path / "again", source, [image, text], opt, folder / "vocab.txt")
    assert message == "model[1]['bert.encoder.layer.1.output.dense.bias']: this weight is missing"


def test_heads_of_a_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of heads is the published one, or set on the command line. A number that does not fit is rejected."""
    opt = options(vocab_size=len(PIECES))
    image, text = random_model(opt)
    pool = {name: weight for name, weight in text.items() if name.startswith("gpool.")}
    bert = {f"bert.{name}": weight for name, weight in random_bert().items()}
    linear = {"linear.weight": torch.ones(8, 24), "linear.bias": torch.zeros(8)}
    path = write_checkpoint(tmp_path / "model_best.pth", [image, {**bert, **linear, **pool}], opt)
    out = tmp_path / "run"
    command = ["convert", path, "--source", "vse_infty", "--vocab", folder / "vocab.txt", "--out", out, "--bert-heads"]
    assert cli.run([str(argument) for argument in [*command, 6]]) == 0
    assert models.load(out).config.bert_heads == 6
    out = tmp_path / "other"
    assert error_of(capsys, *command[:-2], out, "--bert-heads", 5) == (
        f"{path}: bert_dim: expected a multiple of the 5 heads, got 24"
    )
    assert error_of(capsys, *command[:-2], out, "--bert-heads", 0) == (
        f"{path}: bert_heads: expected a number at least 1, got 0"
    )
    opt = options()
    gru = write_checkpoint(tmp_path / "gru.pth", random_model(opt), opt)
    words = write_vocabulary(tmp_path / "words.json")
    assert (
        error_of(capsys, "convert", gru, "--source", "vse_infty", "--vocab", words, "--out", out, "--bert-heads", 12)
        == f"{gru}: bert_heads: got 12, but the text encoder is a GRU"
    )
    assert error_of(capsys, "convert", gru, "--source", "scan", "--vocab", words, "--out", out, "--bert-heads", 12) == (
        "bert_heads: expected only for esa, chan, vse_infty, rvsepp, oscar, laps, got 12 for scan"
    )
    assert not out.exists()
