"""Pictures as queries of an index whose features come from a separate vision model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast.data import open_split
from itm_fast.models.vision_folder import PictureEncoder, load_picture_encoder
from itm_fast.search import Index, encoder_kind, encoders
from itm_fast.search.members import Members
from itm_fast.training.config import TrainConfig, to_yaml
from python_tests.helpers.commands import error, output
from python_tests.helpers.pictures import write_encoder, write_pictures
from python_tests.helpers.search import likeness, rounded, scan


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_encoder(tmp_path / "vit")
    write_pictures(tmp_path / "pictures", 6)
    return tmp_path / "pictures"


def test_a_picture_is_encoded_by_the_model_that_made_the_features(pictures: Path, tmp_path: Path) -> None:
    model = scan(feature_dim=16)
    files = sorted(pictures.iterdir())
    vision = load_picture_encoder(tmp_path / "vit", pool="2x2")
    features = torch.cat([vision(torch.from_numpy(vision.preprocessing.picture(file))[None]) for file in files])
    with torch.no_grad():
        encoded = model.encode_images(features)
    kind = encoder_kind(tmp_path / "vit", pool="2x2")
    stored = Index.build(model, features, tmp_path / "features", ids=[file.name for file in files], preprocessing=kind)
    folder = Index.build(model, str(pictures), tmp_path / "folder", preprocessing=kind)
    regions = [rounded(encoded[number], "bf16") for number in range(6)]
    scores = [likeness(encoded[2].double().numpy(), other) for other in regions]
    for index in (stored, folder):
        for picture in (files[2], files[2].read_bytes()):
            (found,) = index.search(pictures=[picture], k=6, of="images")
            assert found.hits[0].item.id == files[2].name
            np.testing.assert_allclose([hit.score for hit in found.hits], np.sort(scores)[::-1], atol=2e-5)


def test_an_encoder_that_moved_or_changed(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = sorted(pictures.iterdir())[0]
    path, model = tmp_path / "index", scan(feature_dim=16)
    Index.build(model, str(pictures), path, preprocessing=encoder_kind(tmp_path / "vit"))
    (tmp_path / "vit").rename(tmp_path / "moved")
    # The index is opened by another process than the one that loaded the encoder.
    encoders._loaded.cache_clear()
    index = Index.open(path, model)
    with pytest.raises(ValueError, match=r"or record it with itm-fast index relocate$") as raised:
        index.search(pictures=[picture], k=1, of="images")
    assert str(raised.value).startswith(str(tmp_path / "vit"))
    (found,) = index.search(pictures=[picture], k=1, of="images", encoder=tmp_path / "moved")
    assert found.hits[0].item.id == picture.name
    settings = tmp_path / "moved" / "preprocessor_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps({**content, "image_mean": [0.1, 0.2, 0.3]}))
    encoders._loaded.cache_clear()
    with pytest.raises(ValueError, match="not the encoder that made the features of the index, or it has changed"):
        index.search(pictures=[picture], k=1, of="images", encoder=tmp_path / "moved")
    unnamed = Index.build(model, np.zeros((2, 3, 16), np.float32), tmp_path / "unnamed")
    with pytest.raises(ValueError, match="encoder: the index does not know a vision model that made its features"):
        unnamed.search(pictures=[picture], k=1, of="images", encoder=tmp_path / "moved")
    capsys.readouterr()
    refused = error(capsys, "search", path, "a text", "--encoder", tmp_path)
    assert refused == (1, "--encoder: expected only with --image")


def test_a_store_names_the_encoder_of_its_features(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another layer or pool of the same model makes other features, which the model was not trained on."""
    captions, store, run, path = (tmp_path / name for name in ("captions.csv", "store", "run", "index"))
    files = sorted(pictures.iterdir())
    splits = ("train", "train", "dev", "dev", "test", "test")
    rows = [f"{file.name},a red thing,{split}\n" for file, split in zip(files, splits, strict=True)]
    captions.write_text("image,caption,split\n" + "".join(rows))
    model = scan(feature_dim=16)
    vocabulary = model.tokenizer
    model.save(run)
    vocabulary.save(run / "vocab.json")
    output(capsys, "data", "import", "--images", pictures, "--captions", captions, "--encoder", tmp_path / "vit",
           "--layer", 1, "--pool", "2x2", "--out", store, "--workers", 0, "--vocab", run / "vocab.json")  # fmt: skip
    build = ["index", "build", "--checkpoint", run, "--data", store, "--out", path, "--pooling", "mean"]
    output(capsys, *build)
    index = Index.open(path)
    assert index.manifest.pictures == encoder_kind(tmp_path / "vit", 1, "2x2")
    (found,) = index.search(pictures=[files[4]], k=1, of="images")
    assert found.hits[0].item.id == files[4].name
    place = tmp_path / "vit"
    made = f"encoder: the features were made with layer 1 and pool 2x2 of {place}, got"
    refused = f"{made} layer -1 and pool patches of {place}"
    assert error(capsys, *build, "--overwrite", "--encoder", place) == (1, refused)
    kind, dev = encoder_kind(place), open_split(store, "dev", vocabulary)
    with pytest.raises(ValueError, match=f"^{refused}$"):
        Index.build(model, dev, tmp_path / "other", preprocessing=kind)
    (run / "train.yaml").write_text(to_yaml(TrainConfig(data=str(store), out=str(run))))
    from_pictures = ["index", "build", "--checkpoint", run, "--pictures", pictures, "--out", tmp_path / "folder"]
    for pooling in ([], ["--pooling", "mean"]):
        assert error(capsys, *from_pictures, *pooling, "--encoder", place) == (1, refused)
    preprocessing = f"{made} '224x14'"
    assert error(capsys, *from_pictures, "--preprocessing", "224x14") == (1, preprocessing)
    output(capsys, *from_pictures, "--encoder", place, "--layer", 1, "--pool", "2x2")
    Index.build(model, str(pictures), tmp_path / "other", preprocessing=kind)
    with pytest.raises(ValueError, match=f"^{refused}$"):
        Index.open(tmp_path / "other", model).add(dev)
    place.rename(tmp_path / "moved")
    encoders._loaded.cache_clear()
    write_pictures(tmp_path / "more", 2, "dev")
    arguments = ["index", "add", path, "--pictures", tmp_path / "more"]
    status, message = error(capsys, *arguments)
    advice = "if it was moved, name its folder with --encoder DIR, or record it with itm-fast index relocate"
    assert (status, message.endswith(advice)) == (1, True)
    output(capsys, *arguments, "--encoder", tmp_path / "moved")
    assert Index.open(path).size("images") == 4
    output(capsys, "index", "relocate", path, "--encoder", tmp_path / "moved")
    (again,) = Index.open(path).search(pictures=[files[4]], k=1, of="images")
    assert again.hits == found.hits
    write_encoder(tmp_path / "other", seed=1)
    status, message = error(capsys, "index", "relocate", path, "--encoder", tmp_path / "other")
    assert (status, message) == (
        1, f"{tmp_path}/other: not the encoder that made the features of the index, or it has changed",
    )  # fmt: skip


def test_pictures_of_another_preprocessing_are_refused() -> None:
    message = (
        "preprocessing: the features were made as 224x14, but pictures of the index become features as 224x14 stretched"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        encoders.check_same_kind("224x14", "224x14 stretched")
    for made_by, kind in (("224x14", "224x14"), ("", "emoji"), ("emoji", "")):
        encoders.check_same_kind(made_by, kind)


def test_the_encoder_runs_where_the_model_runs(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    monkeypatch.setattr(PictureEncoder, "to", lambda self, device: devices.append(device) or self)
    monkeypatch.setattr(Members, "device", torch.device("cuda"))
    index = Index.build(scan(feature_dim=16), str(pictures), tmp_path / "index",
                        preprocessing=encoder_kind(tmp_path / "vit"), batch_size=4)  # fmt: skip
    assert devices == [torch.device("cuda")] * 2
    index.search(pictures=[sorted(pictures.iterdir())[0]], of="images", k=1)
    assert devices == [torch.device("cuda")] * 3
