"""Models come and go through the Hub's mixin: real files and the real cache; a stand-in takes the uploads."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from itm_fast import models
from itm_fast.data import Vocabulary
from itm_fast.files.environment import source_commit
from itm_fast.models import hub
from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics
from itm_fast.version import __version__
from python_tests.helpers.full_disk import no_file_above
from python_tests.helpers.processes import run_python

FILES = ["README.md", "config.json", "model.safetensors", "vocab.json"]
RESULT = {
    "protocols": {
        "f30k": {"i2t_r1": 71.25, "rsum": 491.5, "intervals": {"i2t_r1": [68.5, 74.0]}},
        "full": {"rsum": 490.0},
    }
}


class Client:
    """Keeps what is uploaded in a folder, as a repository would."""

    uploads: ClassVar[list[dict[str, object]]] = []
    looked: ClassVar[list[tuple[str | None, str, str | None]]] = []
    remote: ClassVar[Path] = Path()

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> SimpleNamespace:
        assert exist_ok
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"user/{repo_id}")

    def file_exists(self, repo_id: str, filename: str, *, revision: str | None) -> bool:
        self.looked.append((self.token, repo_id, revision))
        return (self.remote / filename).is_file()

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None) -> str:
        return str(self.remote / filename)

    def upload_folder(self, *, folder_path: Path, **options: object) -> str:
        shutil.copytree(folder_path, self.remote, dirs_exist_ok=True)
        self.uploads.append({"token": self.token, **options})
        return "https://hub.example/commit/1"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    monkeypatch.setattr(Client, "remote", tmp_path / "remote")
    monkeypatch.setattr(Client, "uploads", [])
    monkeypatch.setattr(Client, "looked", [])
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Client)
    monkeypatch.setattr("huggingface_hub.HfApi", Client)
    return Client


def scores(model: models.MatchingModel) -> torch.Tensor:
    features = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    return model.score(model.encode_images(features.numpy()), model.encode_captions(["red ball", "a dog", "tree"]))


def test_a_model_goes_to_the_hub_and_comes_back_with_its_card(
    trained: Path, tmp_path: Path, client: type[Client]
) -> None:
    model = models.load(trained)
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    address = model.push_to_hub(
        "anna/scan", run=trained, results=tmp_path / "result.json", token="secret", private=True, commit_message="First"
    )
    assert address == "https://hub.example/commit/1"
    (upload,) = client.uploads
    assert (upload["repo_id"], upload["token"], upload["commit_message"]) == ("anna/scan", "secret", "First")
    assert sorted(path.name for path in client.remote.iterdir()) == FILES

    # A repository in the cache of the client, as a download leaves it.
    cached = tmp_path / "cache" / "models--anna--scan"
    shutil.copytree(client.remote, cached / "snapshots" / "1234")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1234")
    again = models.SCAN.from_pretrained("anna/scan", cache_dir=tmp_path / "cache", local_files_only=True)
    torch.testing.assert_close(scores(again), scores(model), rtol=0, atol=0)
    assert not again.training

    card = ModelCard.load(client.remote / "README.md")
    assert card.data.library_name == "itm_fast"
    found = {(one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    assert found == {("f30k", "i2t_r1"): 71.25, ("f30k", "rsum"): 491.5, ("full", "rsum"): 490.0}
    assert "| i2t_r1 | 71.25 | 68.50 to 74.00 |" in card.text
    assert "| rsum | 491.50 |  |" in card.text
    for name, digest in load_state(trained)["data"].items():
        assert f"| {name} | `{digest}` |" in card.text
    [*_, best] = sorted((line for line in read_metrics(trained / "metrics.jsonl") if line["kind"] == "validation"),
                        key=lambda line: line["rsum"])  # fmt: skip
    assert f"RSUM {best['rsum']:.1f} on `dev` after step {best['step']}." in card.text
    shown = yaml.safe_load(card.text.split("## Training")[1].split("```yaml")[1].split("```")[0])
    saved = yaml.safe_load((trained / "train.yaml").read_text())
    changed = {"data": Path(saved["data"]).name, "out": Path(saved["out"]).name}
    assert shown == {**saved, **changed}
    assert str(trained.parent) not in card.content
    commit, _ = source_commit()
    assert commit is None or f"This card was written with itm_fast {__version__} (commit `{commit}`" in card.text


def test_a_local_folder_needs_neither_package_nor_network(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.load(trained)
    folder = tmp_path / "saved"
    with pytest.raises(TypeError, match=r"^result: expected only with push_to_hub=True$"):
        model.save_pretrained(folder, result="results.json")
    assert model.save_pretrained(folder) is None
    assert sorted(path.name for path in folder.iterdir()) == FILES
    (folder / "README.md").write_text("mine")
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "mine"
    code = f"""
import sys, socket
sys.modules["huggingface_hub"] = None
socket.socket.connect = None
from itm_fast.models import MatchingModel
print(type(MatchingModel.from_pretrained({str(folder)!r})).__name__)
"""
    assert run_python(code) == "SCAN\n"
    with pytest.raises(ValueError, match=r"expected a model vsepp, found 'scan'; MatchingModel.from_pretrained loads"):
        models.VSEPP.from_pretrained(folder)
    hub._bridge.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"not installed; install it with pip install 'itm_fast\[hub\]', or use"):
        model.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_nothing_is_sent_unless_asked(trained: Path, tmp_path: Path, client: type[Client]) -> None:
    models.load(trained).save_pretrained(tmp_path / "anna", run=trained)
    assert client.uploads == []
    assert models.load(trained).save_pretrained(tmp_path / "anna", push_to_hub=True) == "https://hub.example/commit/1"
    assert [upload["repo_id"] for upload in client.uploads] == ["user/anna"]


def test_a_card_that_someone_edited_is_kept(trained: Path, tmp_path: Path, client: type[Client]) -> None:
    """In the folder, which is uploaded with its own card, and in the repository."""
    model, folder = models.load(trained), tmp_path / "scan"
    model.save_pretrained(folder)
    (folder / "README.md").write_text("of the folder")
    model.save_pretrained(folder, push_to_hub=True)
    assert (client.remote / "README.md").read_text() == "of the folder"
    assert client.looked == []
    model.push_to_hub("anna/scan", token="secret", branch="next")
    assert (client.remote / "README.md").read_text() == "of the folder"
    assert client.looked == [("secret", "anna/scan", "next")]
    model.push_to_hub("scan", replace_card=True)
    assert 'from_pretrained("user/scan")' in (client.remote / "README.md").read_text()


def test_a_model_whose_successor_finds_a_full_disk_is_kept(trained: Path, tmp_path: Path) -> None:
    model = models.load(trained)
    model.save_pretrained(tmp_path / "anna")
    before = {path.name: path.read_bytes() for path in (tmp_path / "anna").iterdir()}
    words = model.tokenizer.words
    model.tokenizer = Vocabulary([*words[:5], *words[:4:-1]])
    with (
        no_file_above(len(before["model.safetensors"]) - 1),
        pytest.raises(OSError, match="cannot be written: File too"),
    ):
        model.save_pretrained(tmp_path / "anna")
    assert {path.name: path.read_bytes() for path in (tmp_path / "anna").iterdir()} == before


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1], "results: expected the result of itm-fast score --json or itm-fast evaluate --json, got [1]"),
        ({"protocols": {"full": {"rsum": 1.0, "intervals": {"rsum": [1]}}}},
         "results: full: intervals: expected two numbers for each measure"),
    ],
)  # fmt: skip
def test_bad_results_are_named_before_anything_is_written(
    trained: Path, tmp_path: Path, result: object, message: str
) -> None:
    path = tmp_path / "results"
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        models.load(trained).save_pretrained(tmp_path / "saved", results=path)
    assert str(raised.value).removeprefix(f"{tmp_path}/") == message
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match=r"train\.yaml: no such file; .* is not a run directory"):
        models.load(trained).save_pretrained(tmp_path / "saved", run=tmp_path)


def test_a_missing_repository_is_the_error_of_the_client(tmp_path: Path) -> None:
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        models.SCAN.from_pretrained("anna/none", cache_dir=tmp_path, local_files_only=True)
