"""`itm-fast score` on files that plain NumPy writes: tables, JSON, rankings, messages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.evaluation import score_matrix
from itm_fast.evaluation.ground_truth import Ids
from itm_fast.evaluation.ranking import rank_folds, saved_rankings
from itm_fast.evaluation.score_sources import MatrixScores
from itm_fast.evaluation.score_truth import score_truth
from itm_fast.evaluation.standards import PROTOCOLS, Standard
from python_tests.helpers.commands import error
from python_tests.helpers.plain_retrieval import fold_means, standard

OWNERS = np.arange(60) // 5


def table(seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    scores = random.standard_normal((12, 60))
    scores[OWNERS, np.arange(60)] += 1.5
    return scores


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "scores.npy", table())
    return tmp_path / "scores.npy"


def run(*arguments: object) -> None:
    assert cli.run(["score", *map(str, arguments)]) == 0


def test_a_matrix(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(file, "--json", tmp_path / "r.json", "--folds", 3, "--bootstrap", 20)
    printed, found = capsys.readouterr(), json.loads((tmp_path / "r.json").read_text())
    expected = fold_means(table().tolist(), OWNERS.tolist(), 3)
    result = found["protocols"]["full"]
    ends = result.pop("intervals")
    assert result == pytest.approx(expected, rel=1e-12)
    assert (found["images"], found["captions"], found["ties"], found["warnings"]) == (12, 60, "pessimistic", [])
    assert found["scores"] == [str(file)]
    assert found["bootstrap"] == {"samples": 20, "seed": 0}
    lines = printed.out.splitlines()
    assert lines[2].split() == ["full", *(
        f"{expected[key]:.1f}"
        for key in [f"{way}_{name}" for way in ("i2t", "t2i") for name in ("r1", "r5", "r10", "medr", "meanr")]
    ), f"{expected['rsum']:.1f}", f"{expected['mean_distance']:.2f}"]  # fmt: skip
    low, high = ends["t2i_r5"]
    assert low <= expected["t2i_r5"] <= high
    assert f"t2i_r5 {expected['t2i_r5']:.2f} {low:.2f} to {high:.2f}" in [" ".join(line.split()) for line in lines]
    assert printed.err == ""


def test_two_matrices(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = table() + table(1)
    np.savez(tmp_path / "other.npz", sims=other.T)
    note = (
        f"{tmp_path / 'other.npz'}: 60 x 12: read as captions x images, because images are the fewer; scores are images"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(note)} x captions$"):
        run(
            file, "--against", tmp_path / "other.npz", "--json", tmp_path / "r.json", "--bootstrap", 20,
            "--permutations", 30,
        )  # fmt: skip
    printed, found = capsys.readouterr(), json.loads((tmp_path / "r.json").read_text())
    assert found["permutations"] == 30
    against = found["protocols"]["full"]["against"]
    differences = against.pop("differences")
    expected = standard(table().tolist(), OWNERS.tolist()), standard(other.tolist(), OWNERS.tolist())
    assert against.pop("scores") == str(tmp_path / "other.npz")
    assert against == pytest.approx(expected[1], rel=1e-12)
    for name, one in differences.items():
        assert one["difference"] == pytest.approx(expected[0][name] - expected[1][name], abs=1e-9)
        assert one["interval"][0] <= one["difference"] <= one["interval"][1]
        assert 1 / 31 <= one["p"] <= 1
    assert "  scores minus against  " in printed.out
    (row,) = (line.split() for line in printed.out.splitlines() if line.startswith("rsum"))
    assert row[1:4] == [
        f"{expected[0]['rsum']:.2f}", f"{expected[1]['rsum']:.2f}", f"{differences['rsum']['difference']:+.2f}",
    ]  # fmt: skip


def test_the_second_matrix_is_looked_at(file: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    other = table(1)
    other[0, 59] = np.nan
    np.save(tmp_path / "other.npy", other.T)
    run(
        file, "--against", tmp_path / "other.npy", "--bootstrap", 0, "--permutations", 9,
        "--json", tmp_path / "r.json", "--report", tmp_path / "page.html",
    )  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())["warnings"]
    assert [str(one.message) for one in recwarn] == found
    assert found[0].startswith(f"{tmp_path / 'other.npy'}: 60 x 12: read as captions x images")
    assert found[1:] == [
        f"{tmp_path / 'other.npy'}: scores that are NaN: 1, the first of image 0 and caption 59; they count as the "
        "lowest"
    ]
    assert all(line in (tmp_path / "page.html").read_text() for line in found)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_second_matrix_has_its_own_name_and_layout(transposed: bool, tmp_path: Path) -> None:
    """The options of the first file are forced on no other one."""
    np.savez(tmp_path / "first.npz", sims=table().T, other=table(2).T)
    mine, sims = (table(seed).T if transposed else table(seed) for seed in (1, 3))
    np.save(tmp_path / "second.npy", mine)
    np.savez(tmp_path / "second.npz", sims=sims, mine=mine)
    for name, more, seed in (
        ("second.npy", [], 1),
        ("second.npz", ["--against-key", "mine"], 1),
        ("second.npz", [], 3),
    ):
        run(
            tmp_path / "first.npz", "--key", "sims", "--captions-first", "--against", tmp_path / name, *more,
            "--bootstrap", 0, "--permutations", 9, "--json", tmp_path / "r.json",
        )  # fmt: skip
        found = json.loads((tmp_path / "r.json").read_text())
        assert found["warnings"] == []
        against, expected = found["protocols"]["full"]["against"], standard(table(seed).tolist(), OWNERS.tolist())
        assert {measure: against[measure] for measure in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("flags", [[], ["--captions-first"]])
def test_a_square_second_matrix_lies_as_the_first(flags: list[str], tmp_path: Path) -> None:
    scores = table()[:, ::5]
    np.save(tmp_path / "scores.npy", scores.T if flags else scores)
    with pytest.warns(UserWarning, match="captions per image: 1"):
        run(
            tmp_path / "scores.npy", *flags, "--against", tmp_path / "scores.npy", "--bootstrap", 0,
            "--permutations", 9, "--json", tmp_path / "r.json",
        )  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]
    assert all(one["difference"] == 0 for one in result["against"]["differences"].values())
    assert result["t2i_r1"] == pytest.approx(standard(scores.tolist(), list(range(12)))["t2i_r1"])


def test_captions_per_image_are_named_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    np.save(tmp_path / "scores.npy", table()[:, ::5])
    run(tmp_path / "scores.npy", "--against", tmp_path / "scores.npy", "--bootstrap", 0, "--permutations", 9)
    assert [str(one.message) for one in recwarn] == ["captions per image: 1; the published data sets have 5"]


def test_two_matrices_without_resamples_have_no_intervals(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "other.npy", table() + table(1))
    run(
        file, "--against", tmp_path / "other.npy", "--json", tmp_path / "r.json", "--report", tmp_path / "page.html",
        "--bootstrap", 0, "--permutations", 10,
    )  # fmt: skip
    differences = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]["against"]["differences"]
    assert {tuple(one) for one in differences.values()} == {("difference", "p")}
    page = tmp_path / "page.html"
    assert f"{differences['rsum']['difference']:+.2f}" in page.read_text()
    assert "value minus against" in page.read_text()
    for text in (capsys.readouterr().out, page.read_text()):
        assert "95 % interval" not in text


def test_embeddings_and_captions_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    images, captions = random.standard_normal((12, 8)), random.standard_normal((60, 8))
    owners = random.permutation(OWNERS)
    for name, array in (("images", images), ("captions", captions)):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "owners.txt").write_text("".join(f"{owner}\n" for owner in owners))
    for similarity in ("cosine", "dot"):
        run(
            "--image-embeddings", tmp_path / "images.npy", "--caption-embeddings", tmp_path / "captions.npy",
            "--similarity", similarity, "--caption-image", tmp_path / "owners.txt", "--json", tmp_path / "r.json",
            "--bootstrap", 0,
        )  # fmt: skip
        scores = images @ captions.T
        if similarity == "cosine":
            scores /= np.linalg.norm(images, axis=1)[:, None] * np.linalg.norm(captions, axis=1)
        found = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]
        assert found == pytest.approx(standard(scores.tolist(), owners.tolist()), rel=1e-9)
    assert capsys.readouterr().err == ""
    np.savez(tmp_path / "both.npz", i=images, c=captions)
    np.save(tmp_path / "owners.npy", owners)
    run(
        "--image-embeddings", tmp_path / "both.npz", "--image-key", "i", "--caption-embeddings", tmp_path / "both.npz",
        "--caption-key", "c", "--similarity", "dot", "--caption-image", tmp_path / "owners.npy", "--json",
        tmp_path / "again.json", "--bootstrap", 0,
    )  # fmt: skip
    assert json.loads((tmp_path / "again.json").read_text())["protocols"]["full"] == found


def test_rankings(file: Path, tmp_path: Path) -> None:
    run(file, "--rankings", tmp_path / "r.npz", "--top", 4, "--bootstrap", 0)
    expected = saved_rankings(rank_folds(MatrixScores(table()), torch.from_numpy(OWNERS), top=4))
    with np.load(tmp_path / "r.npz") as saved:
        assert set(saved) == {f"full_{name}" for name in expected}
        assert all(np.array_equal(saved[f"full_{name}"], array) for name, array in expected.items())
        assert saved["full_best_images"].shape == (60, 4)


def test_distances_and_optimistic_ties(tmp_path: Path) -> None:
    np.save(tmp_path / "scores.npy", -table().round())
    for flags, negated in ((["--distances"], -1.0), (["--distances", "--optimistic-ties"], -1.0)):
        count = "do not count" if "--optimistic-ties" in flags else "count"
        with pytest.warns(UserWarning, match=f"other pairs tie with the matching one; ties {count} as errors"):
            run(tmp_path / "scores.npy", *flags, "--json", tmp_path / "r.json", "--bootstrap", 0)
        found = json.loads((tmp_path / "r.json").read_text())
        optimistic = "--optimistic-ties" in flags
        assert found["ties"] == ("optimistic" if optimistic else "pessimistic")
        scores = negated * np.load(tmp_path / "scores.npy")
        # An optimist's matching scores are higher by a trifle.
        scores[OWNERS, np.arange(60)] += 1e-6 * optimistic
        expected = standard(scores.tolist(), OWNERS.tolist())
        assert found["protocols"]["full"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("protocols", "ties", "count", "shown"),
    [
        (["eccv"], "pessimistic", "count", "count as errors"),
        (["eccv", "full"], "optimistic", "do not count", "do not count as errors, except in eccv"),
    ],
)
def test_positives_in_files_have_no_optimistic_ties(
    protocols: list[str], ties: str, count: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_truth(12, 60)
    np.save("scores.npy", np.zeros((12, 60)))
    words = [word for name in protocols for word in ("--protocol", name)]
    with pytest.warns(UserWarning, match=f"; ties {count} as errors"):
        run(
            "scores.npy", *words, *TRUTH, "--optimistic-ties", "--bootstrap", 0, "--json", "r.json",
            "--report", "page.html", "--rankings", "r.npz",
        )  # fmt: skip
    found = json.loads(Path("r.json").read_text())
    assert found["ties"] == ties
    assert (found["protocols"]["eccv"]["ties"], found["protocols"]["eccv"]["t2i_r1"]) == ("pessimistic", 0.0)
    assert all("ties" not in found["protocols"][name] for name in protocols if name != "eccv")
    with np.load("r.npz") as saved:
        assert set(saved["full_text_to_image"]) == {11 if ties == "pessimistic" else 0}
    assert f">{shown}<" in Path("page.html").read_text()


def test_several_protocols_of_flickr30k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    scores = random.standard_normal((1000, 5000), np.float32)
    scores[np.arange(5000) // 5, np.arange(5000)] += 3
    np.save(tmp_path / "scores.npy", scores)
    run(tmp_path / "scores.npy", "--protocol", "f30k", "--protocol", "full", "--json", tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())["protocols"]
    assert list(found) == ["f30k", "full"]
    assert found["f30k"] == found["full"]
    own = scores[np.arange(5000) // 5, np.arange(5000)]
    ranks = np.array([(scores[:, caption] > own[caption]).sum() for caption in range(5000)])
    assert found["f30k"]["t2i_r1"] == pytest.approx(100 * (ranks < 1).mean())
    assert found["f30k"]["t2i_meanr"] == pytest.approx(ranks.mean() + 1)
    # The interval of a share p of n independent queries has half a width of 1.96 sqrt(p (1 - p) / n).
    low, high = found["f30k"]["intervals"]["t2i_r1"]
    p = found["f30k"]["t2i_r1"] / 100
    assert high - low == pytest.approx(2 * 196 * (p * (1 - p) / 5000) ** 0.5, rel=0.15)
    assert error(capsys, "score", tmp_path / "scores.npy", "--protocol", "coco1k") == (
        1,
        "protocol coco1k: expected all 5,000 images of the test split of COCO, in five folds; found 1,000 images and "
        "5,000 captions: one fold of COCO, or Flickr30K? --protocol full evaluates any split",
    )


@pytest.mark.parametrize("order", [["coco1k", "coco5k"], ["coco5k", "coco1k"]])
def test_warnings_are_those_of_the_fewest_folds(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds leave out most pairs, so the protocol with one fold is the one to look at."""
    monkeypatch.setitem(PROTOCOLS, "coco1k", Standard(folds=3, images=(12,)))
    monkeypatch.setitem(PROTOCOLS, "coco5k", Standard(images=(12,)))
    scores = table()
    scores[0, 59] = np.nan
    np.save(tmp_path / "scores.npy", scores)
    with pytest.warns(UserWarning, match="^scores that are NaN: 1, the first of image 0 and caption 59"):
        run(
            tmp_path / "scores.npy", *[word for name in order for word in ("--protocol", name)],
            "--bootstrap", 0, "--json", tmp_path / "r.json",
        )  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["protocols"]) == order
    assert len(found["warnings"]) == 1


def test_errors_are_one_line(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "other.npy", table()[:6])
    (tmp_path / "owners.txt").write_text("0\n" * 60)
    np.save(tmp_path / "wrong.npy", [0] * 59 + [12])
    (tmp_path / "junk.npy").write_text("hello")
    (tmp_path / "wrong.txt").write_text("0\n" * 59 + "12\n")
    either = "FILE: give either a score matrix, or --image-embeddings and --caption-embeddings"
    for arguments, message in (
        ([], either),
        ([file, "--image-embeddings", file], either),
        (["--image-embeddings", file], either),
        (
            ["--image-embeddings", file, "--caption-embeddings", file, "--distances"],
            "--captions-first and --distances are for a score matrix, not for embeddings",
        ),
        (
            ["--image-embeddings", file, "--caption-embeddings", file, "--similarity", "l2"],
            "similarity: expected cosine or dot, got 'l2'",
        ),
        *(
            (
                [file, *words],
                "--similarity, --image-key and --caption-key are for embeddings, not for a score matrix; --key names "
                "an array of the file",
            )
            for words in (["--similarity", "dot"], ["--image-key", "a"], ["--caption-key", "a"])
        ),
        (
            [tmp_path / "junk.npy"],
            f"{tmp_path / 'junk.npy'}: not a readable .npy array of numbers (it does not begin as one; 5 bytes on "
            "disk)",
        ),
        (
            [file, "--against", tmp_path / "other.npy"],
            f"{tmp_path / 'other.npy'}: expected scores of the same 12 images, found 6: scores of another split?",
        ),
        (
            [file, "--caption-image", tmp_path / "wrong.txt"],
            f"{tmp_path / 'wrong.txt'}: line 60: expected an image row from 0 to 11, got 12",
        ),
        (
            [file, "--caption-image", tmp_path / "wrong.npy"],
            f"{tmp_path / 'wrong.npy'}: entry 59: expected an image row from 0 to 11, got 12",
        ),
        (
            [file, "--caption-image", file],
            f"{file}: expected whole numbers (captions,), found float64 of shape (12, 60)",
        ),
        *(
            ([file, *words, option, value], f"{option}: has no effect without --protocol eccv, cxc or pmrp")
            for words in ([], ["--protocol", "full", "--protocol", "f30k"])
            for option, value in (
                ("--ground-truth", tmp_path),
                ("--image-ids", "ids.txt"),
                ("--caption-ids", "ids.txt"),
            )
        ),
        *(
            ([file, option, value], f"{option}: has no effect without {needed}")
            for option, value, needed in (
                ("--top", 10, "--rankings"),
                ("--permutations", 10, "--against"),
                ("--against-key", "a", "--against"),
                ("--split", "test", "--data"),
            )
        ),
        ([file, "--protocol", "coco"], "protocol: expected full, f30k, coco1k, coco5k, eccv, cxc, pmrp, got 'coco'"),
        ([file, "--folds", 5], "folds: expected a divisor of the number of images, 12, got 5"),
        ([tmp_path / "none.npy"], f"{tmp_path / 'none.npy'}: No such file or directory"),
        ([file, "--json", tmp_path], f"{tmp_path}: expected a file to write, found a folder"),
    ):
        assert error(capsys, "score", *arguments) == (1, message)


def test_targets_spare_the_inputs_and_each_other(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    link = tmp_path / "link.npy"
    link.symlink_to(file)
    own = tmp_path / "own"
    for option in ("--json", "--rankings", "--report"):
        for arguments, target, other in (
            ([file], file, "FILE"),
            ([link], file, "FILE"),
            (["--image-embeddings", file, "--caption-embeddings", own], file, "--image-embeddings"),
            (["--image-embeddings", own, "--caption-embeddings", file], file, "--caption-embeddings"),
            ([file, "--caption-image", own], own, "--caption-image"),
            ([file, "--against", own], own, "--against"),
            ([file, "--image-ids", own], own, "--image-ids"),
            ([file, "--caption-ids", own], own, "--caption-ids"),
        ):
            message = f"{option}: {target} is also given as {other}; choose another file to write"
            assert error(capsys, "score", *arguments, option, target) == (1, message)
    for first, second in (("--json", "--rankings"), ("--json", "--report"), ("--rankings", "--report")):
        message = f"{second}: {own} is also given as {first}; choose another file to write"
        assert error(capsys, "score", file, first, own, second, own) == (1, message)
    assert file.read_bytes() == before
    assert not own.exists()


def test_evaluate_takes_the_protocols(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "--checkpoint", trained, "--data", data]
    _, message = error(capsys, *command, "--protocol", "f30k")
    assert message.startswith("protocol f30k: expected the test split of Flickr30K (1,000), or its validation split ")
    assert error(capsys, *command, "--protocol", "coco1k", "--folds", "2") == (
        1, "protocol coco1k: has 5 folds, got folds 2; use protocol full",
    )  # fmt: skip
    for words in ([], ["--protocol", "f30k"]):
        for option in ("--ground-truth", "--image-ids", "--caption-ids"):
            message = f"{option}: has no effect without --protocol eccv, cxc or pmrp"
            assert error(capsys, *command, *words, option, tmp_path / "ids") == (1, message)
    results = []
    for more in (["--folds", "2"], ["--folds", "2", "--protocol", "full"]):
        assert cli.run([str(word) for word in [*command, *more, "--json", tmp_path / "r.json"]]) == 0
        results.append(json.loads((tmp_path / "r.json").read_text()))
        del results[-1]["seconds"]
    assert results[1].pop("protocol") == "full"
    assert results[0] == results[1]


def test_evaluate_names_other_numbers_of_captions_per_image(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Images with a sixth caption, as those of COCO may have, still have a result."""
    monkeypatch.setitem(PROTOCOLS, "f30k", Standard(images=(9, 10)))
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    (copy / "test_cap2im.txt").write_text("".join(f"{number // 5}\n" for number in range(50)))
    command = ["evaluate", "--checkpoint", trained, "--data", copy, "--bootstrap", 0, "--protocol", "f30k"]
    assert cli.run(list(map(str, command))) == 0
    assert [str(one.message) for one in recwarn] == []
    with (copy / "test_caps.txt").open("a") as file:
        file.write("a dog\n")
    with (copy / "test_cap2im.txt").open("a") as file:
        file.write("9\n")
    assert cli.run(list(map(str, [*command, "--first-images", 9]))) == 0
    assert [str(one.message) for one in recwarn] == []
    assert cli.run(list(map(str, command))) == 0
    assert [str(one.message) for one in recwarn] == [
        f"{copy}: split test: captions per image: 5 to 6; the published data sets have 5"
    ]


def test_evaluate_and_its_model_card_have_the_intervals_of_the_scores(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(trained / "vocab.json"))
    np.save(tmp_path / "scores.npy", score_matrix(models.load(trained), dataset).numpy())
    options = ["--folds", 2, "--bootstrap", 40, "--seed", 3, "--json", tmp_path / "r.json"]
    run(tmp_path / "scores.npy", "--data", data, *options)
    expected = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]["intervals"]
    assert any(low < high for low, high in expected.values())
    # With all items as candidates, the second model orders all of them.
    for more in ([], ["--streaming"], ["--rerank", len(dataset), "--candidates", trained]):
        command = ["evaluate", "--checkpoint", trained, "--data", data, *options, *more]
        assert cli.run(list(map(str, command))) == 0
        found = json.loads((tmp_path / "r.json").read_text())
        assert found["bootstrap"] == {"samples": 40, "seed": 3}
        assert found["intervals"] == pytest.approx({name: pytest.approx(ends) for name, ends in expected.items()})
        low, high = expected["rsum"]
        assert f"rsum {found['rsum']:.2f} {low:.2f} to {high:.2f}" in " ".join(capsys.readouterr().out.split())
    models.load(trained).save_pretrained(tmp_path / "shared", results=tmp_path / "r.json")
    assert f"| rsum | {found['rsum']:.2f} | {low:.2f} to {high:.2f} |" in (tmp_path / "shared/README.md").read_text()
    assert cli.run(list(map(str, [*command, "--bootstrap", 0]))) == 0
    assert "intervals" not in json.loads((tmp_path / "r.json").read_text())


TRUTH = ["--image-ids", "images.txt", "--caption-ids", "captions.txt", "--ground-truth", "."]


def write_truth(n_images: int, n_captions: int) -> None:
    """Write numbers, and one positive for the first image and the first caption."""
    for name, n, first in (("images", n_images, 500), ("captions", n_captions, 9000)):
        Path(f"{name}.txt").write_text("".join(f"{first + number}\n" for number in range(n)))
    Path("eccv_image_to_caption.json").write_text('{"500": [9000, 9007]}')
    Path("eccv_caption_to_image.json").write_text('{"9000": [500]}')


def test_positives_in_files(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_truth(12, 60)
    run(
        file, "--protocol", "eccv", *TRUTH, "--json", "r.json", "--bootstrap", 5, "--against", file,
        "--rankings", "r.npz", "--top", 3,
    )  # fmt: skip
    with np.load("r.npz") as saved:  # The ranks of the own captions, as without --protocol.
        assert np.array_equal(saved["full_best_captions"], np.argsort(-table())[:, :3])
    found = json.loads(Path("r.json").read_text())["protocols"]["eccv"]
    order = np.argsort(-table()[0]).tolist()
    ranks = sorted(order.index(caption) for caption in (0, 7))
    assert found["i2t_r_precision"] == 50.0 * sum(rank < 2 for rank in ranks)
    assert found["t2i_r1"] == 100.0 * (table()[:, 0].argmax() == 0)
    assert found["against"]["differences"]["i2t_map_at_r"]["p"] == 1
    printed = capsys.readouterr().out
    assert printed.startswith("eccv\nmeasure")
    assert f"i2t_r_precision {found['i2t_r_precision']:.2f}" in " ".join(printed.split())
    run(file, "--protocol", "eccv", *TRUTH, "--bootstrap", 0)
    assert " ".join(capsys.readouterr().out.split()).startswith(
        f"eccv measure value 95 % interval i2t_map_at_r {found['i2t_map_at_r']:.2f}"
    )
    message = (
        "--protocol: eccv, cxc and pmrp need --ground-truth DIR, the folder of their files, and --image-ids FILE and "
        "--caption-ids FILE, the COCO number of each image and caption"
    )
    assert error(capsys, "score", file, "--protocol", "cxc", *TRUTH[2:]) == (1, message)


def test_evaluate_takes_positives_in_files(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(trained / "vocab.json"))
    monkeypatch.chdir(tmp_path)
    write_truth(dataset.n_images, len(dataset))
    command = ["evaluate", "--checkpoint", trained, "--data", data, "--protocol", "eccv", *TRUTH]
    assert cli.run([str(word) for word in [*command, "--json", "r.json"]]) == 0
    found = json.loads(Path("r.json").read_text())
    scores = score_matrix(models.load(trained), dataset).numpy()
    ranks = sorted(np.argsort(-scores[0], kind="stable").tolist().index(caption) for caption in (0, 7))
    assert found["i2t_r_precision"] == 50.0 * sum(rank < 2 for rank in ranks)
    assert found["t2i_r1"] == 100.0 * (scores[:, 0].argmax() == 0)
    assert f"t2i_r1 {found['t2i_r1']:.2f}" in " ".join(capsys.readouterr().out.split())
    assert cli.run([str(word) for word in [*command, "--streaming", "--json", "s.json"]]) == 0
    streamed = json.loads(Path("s.json").read_text())
    assert {**streamed, "seconds": 0} == {**found, "seconds": 0}
    models.load(trained).save_pretrained("shared", results="s.json")
    assert "## Results: eccv\n\n| measure | value | 95 % interval |" in Path("shared/README.md").read_text()
    assert error(capsys, *command, "--first-images", "5") == (
        1, "--protocol eccv: needs all images; leave out --first-images",
    )  # fmt: skip
    Path("captions.txt").write_text("9000\n")
    message = f"captions.txt: expected one number per line for {len(dataset)} captions, found 1: of another split?"
    assert error(capsys, *command) == (1, message)


def test_evaluate_draws_the_samples_of_cxc_by_its_seed(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(trained / "vocab.json"))
    monkeypatch.chdir(tmp_path)
    write_truth(dataset.n_images, len(dataset))
    rows = [f"{9000 + caption},{500 + caption * 7 % 10},{caption * 3 % 11 / 2},c2i\n" for caption in range(50)]
    Path("sits_test.csv").write_text("caption,image,agg_score,sampling_method\n" + "".join(rows))
    command = ["evaluate", "--checkpoint", trained, "--data", data, "--protocol", "cxc", *TRUTH, "--bootstrap", 0]
    assert cli.run([str(word) for word in [*command, "--seed", 3, "--json", "r.json"]]) == 0
    found = json.loads(Path("r.json").read_text())["sits_spearman"]
    source = MatrixScores(score_matrix(models.load(trained), dataset))
    ids = Ids(np.arange(500, 510), np.arange(9000, 9050))
    by_seed = [
        score_truth("cxc", source, dataset.caption_image, tmp_path, ids, seed=seed).summary["sits_spearman"]
        for seed in (0, 3)
    ]
    assert found == by_seed[1] != by_seed[0]
