"""ECCV Caption, Crisscrossed Captions and plausible matches on small made files equal plain loops and the oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast.evaluation.ground_truth import Ids, read_ids, read_ratings
from itm_fast.evaluation.many_positives import r_precision
from itm_fast.evaluation.plausible import plausible_precision
from itm_fast.evaluation.score_sources import EmbeddingScores, MatrixScores
from itm_fast.evaluation.score_truth import score_truth
from itm_fast.evaluation.standards import PROTOCOLS
from python_tests.helpers.plain_retrieval import ranked, spearman, with_positives

N, M = 10, 50
OWNERS = torch.arange(M) // 5
RANDOM = np.random.default_rng(0)
IDS = Ids(RANDOM.permutation(900)[:N] + 100, RANDOM.permutation(90_000)[:M] + 1000)


def table() -> np.ndarray:
    """Return scores with few values, so that many tie."""
    scores = np.random.default_rng(1).standard_normal((N, M)).round(1)
    scores[OWNERS.numpy(), np.arange(M)] += 1
    return scores


def truth_of(kind: str, folder: Path) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Write made positives of seven images and twenty captions; return them as indices."""
    random = np.random.default_rng(2)
    of_images = {i: {*range(5 * i, 5 * i + 3), *random.integers(0, M, 8).tolist()} for i in range(7)}
    of_captions = {c: {c // 5, *random.integers(0, N, 3).tolist()} for c in range(5, 25)}
    for name, table, queries, items in (
        ("image_to_caption", of_images, IDS.images, IDS.captions),
        ("caption_to_image", of_captions, IDS.captions, IDS.images),
    ):
        content = {str(queries[q]): [int(items[item]) for item in listed] for q, listed in table.items()}
        (folder / f"{kind}_{name}.json").write_text(json.dumps(content))
    return of_images, of_captions


def scored(name: str, folder: Path, scores: np.ndarray | None = None, folds: int = 1) -> Mapping[str, float]:
    source = MatrixScores(table() if scores is None else scores)
    return score_truth(name, source, OWNERS, folder, IDS, folds=folds, samples=30, seed=4).summary


def plain(scores: np.ndarray, of_images: dict[int, set[int]], of_captions: dict[int, set[int]]) -> dict[str, float]:
    found = {}
    for prefix, queries, positives in (
        ("i2t", dict(enumerate(scores.tolist())), of_images),
        ("t2i", dict(enumerate(scores.T.tolist())), of_captions),
    ):
        found |= {f"{prefix}_{name}": value for name, value in with_positives(queries, positives).items()}
    return found


def test_eccv_caption(tmp_path: Path) -> None:
    positives = truth_of("eccv", tmp_path)
    lost = table()
    lost[3, 7] = np.nan
    for scores in (table(), lost, np.zeros((N, M))):
        assert scored("eccv", tmp_path, scores) == pytest.approx(plain(scores, *positives), rel=1e-12)


def test_owners_may_be_an_array_or_a_list(tmp_path: Path) -> None:
    truth_of("eccv", tmp_path)
    source, expected = MatrixScores(table()), scored("eccv", tmp_path)
    for owners in (OWNERS.tolist(), OWNERS.numpy().astype(np.uint16)):
        assert score_truth("eccv", source, owners, tmp_path, IDS).summary == expected
    with pytest.raises(TypeError, match=r"^caption_image: expected integers, got torch.float64$"):
        score_truth("eccv", source, OWNERS.numpy() / 5, tmp_path, IDS)
    with pytest.raises(ValueError, match=r"^caption_image: expected shape \(50,\) as many as there are captions, got"):
        score_truth("eccv", source, OWNERS[1:], tmp_path, IDS)


def test_a_positive_that_the_scores_lack_is_not_found(tmp_path: Path) -> None:
    of_images, of_captions = truth_of("eccv", tmp_path)
    path = tmp_path / "eccv_image_to_caption.json"
    content = json.loads(path.read_text())
    content[str(IDS.images[2])].append(7)
    path.write_text(json.dumps(content))
    of_images[2].add(M + 1)
    total = sum(map(len, of_images.values()))
    message = (
        f"^protocol eccv: 1 of {total} positives \\(i2t\\) are not among the numbers of the scores; they count as not "
        "found$"
    )
    with pytest.warns(UserWarning, match=message):
        found = scored("eccv", tmp_path)
    assert found == pytest.approx(plain(table(), of_images, of_captions), rel=1e-12)


def test_numbers_in_another_order_are_suspicious(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    n = 40
    ids, owners = Ids(np.arange(n), 100 + np.arange(5 * n)), torch.arange(5 * n) // 5
    positives = {
        "image_to_caption": {i: list(range(100 + 5 * i, 105 + 5 * i)) for i in range(n)},
        "caption_to_image": {100 + c: [c // 5, 0] for c in range(5 * n)},
    }
    for kind, table in positives.items():
        (tmp_path / f"eccv_{kind}.json").write_text(json.dumps(table))
    source = MatrixScores(np.random.default_rng(0).standard_normal((n, 5 * n)))
    score_truth("eccv", source, owners, tmp_path, ids)
    assert not recwarn.list
    message = (
        "protocol eccv: only 5 of 200 captions have their own image among their positives: are --image-ids and "
        "--caption-ids in the order of the scores?"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        score_truth("eccv", source, owners, tmp_path, Ids(ids.images, ids.captions[::-1].copy()))


def test_the_package_eccv_caption_agrees(tmp_path: Path) -> None:
    metrics = pytest.importorskip("eccv_caption").Metrics()
    # Without ties, which the package does not see.
    scores = np.random.default_rng(5).standard_normal((N, M))
    scores[OWNERS.numpy(), np.arange(M)] += 1
    for kind in ("eccv", "pm"):
        truth_of(kind, tmp_path)
        paths = [str(tmp_path / f"{kind}_{name}.json") for name in ("image_to_caption", "caption_to_image")]
        getattr(metrics, f"set_{kind}_gts")(*paths)
    retrieved = {
        "i2t": {int(IDS.images[i]): IDS.captions[np.argsort(-scores[i])].tolist() for i in range(N)},
        "t2i": {int(IDS.captions[c]): IDS.images[np.argsort(-scores[:, c])].tolist() for c in range(M)},
    }
    theirs = {**metrics.eccv_metrics(retrieved, "all"), "pmrp": metrics.pmrp(retrieved, "all")}
    theirs |= {f"eccv_r{k}": metrics.eccv_recalls(retrieved, "all", K=k) for k in (5, 10)}
    ours = {**scored("eccv", tmp_path, scores), **scored("pmrp", tmp_path, scores)}
    names = {"eccv_rprecision": "r_precision"}
    expected = {
        f"{way}_{names.get(name, name.removeprefix('eccv_'))}": 100 * value
        for name, values in theirs.items()
        for way, value in values.items()
    }
    assert ours == pytest.approx(expected, rel=1e-12)


def class_file(folder: Path) -> np.ndarray:
    """Write object annotations of all images but the last two; return their classes."""
    random = np.random.default_rng(6)
    classes = random.random((N, 5)) < 0.4
    classes[:, 0] |= ~classes.any(1)
    classes[-2:] = False
    annotations = [
        {"image_id": int(IDS.images[i]), "category_id": 3 + 7 * int(c), "segmentation": [[1.0, 2.0]], "bbox": [1, 2, 3]}
        for i, c in np.argwhere(classes)
    ]
    annotations.append({"image_id": 5, "category_id": 90})
    (folder / "instances_val2014.json").write_text(json.dumps({"annotations": annotations * 2, "images": []}))
    return classes


@pytest.mark.parametrize("folds", [1, 2])
def test_plausible_matches_of_classes(tmp_path: Path, folds: int) -> None:
    classes = class_file(tmp_path)
    scores = table()
    expected = {}
    for way in ("i2t", "t2i"):
        of_folds = []
        for first in range(0, N, N // folds):
            images = [i for i in range(first, first + N // folds) if classes[i].any()]
            captions = [c for c in range(M) if c // 5 in images]
            values = []
            for query in images if way == "i2t" else captions:
                own = query if way == "i2t" else query // 5
                candidates = captions if way == "i2t" else images
                row = [scores[query, c] if way == "i2t" else scores[c, query] for c in candidates]
                for most in (0, 1, 2):
                    others = [c // 5 if way == "i2t" else c for c in candidates]
                    right = {
                        place for place, other in enumerate(others) if (classes[own] != classes[other]).sum() <= most
                    }
                    values.append(sum(place in right for place in ranked(row, right)[: len(right)]) / len(right))
            of_folds.append(100 * sum(values) / len(values))
        expected[f"{way}_pmrp"] = sum(of_folds) / folds
    assert scored("pmrp", tmp_path, scores, folds) == pytest.approx(expected, rel=1e-12)


def test_images_without_captions_are_no_queries_of_plausible_matches() -> None:
    classes = np.array([[True, False], [True, True], [False, True]])
    source = MatrixScores(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.3]]))
    for direction, queries in (("i2t", [0, 2]), ("t2i", [0, 2])):
        images, values = plausible_precision(
            source, torch.tensor([0, 2]), classes, direction, images=torch.arange(3), captions=torch.arange(2)
        )
        assert images.tolist() == queries
        assert np.isfinite(values).all()


def test_r_precision_by_the_score_at_rank_r() -> None:
    random = np.random.default_rng(7)
    for _ in range(200):
        scores = random.integers(0, 4, (1, 9)).astype(float)
        scores[random.random((1, 9)) < 0.1] = np.nan
        right = random.random((1, 9)) < 0.5
        right[0, 0] = True
        order = ranked(np.where(np.isnan(scores), -9.0, scores)[0].tolist(), set(np.flatnonzero(right[0]).tolist()))
        n = int(right.sum())
        expected = sum(bool(right[0, place]) for place in order[:n]) / n
        assert float(r_precision(torch.from_numpy(scores), torch.from_numpy(right))) == pytest.approx(expected)


def write_ratings(folder: Path, task: str, split: str = "test", ids: Ids = IDS) -> list[tuple[int, int, float]]:
    random = np.random.default_rng(len(task) + ord(task[1]))
    caption, image = "COCO_val2014:sentid:{}", "COCO_val2014_{:012d}.jpg"
    sides = {"sits": (caption, image), "sts": (caption, caption), "sis": (image, image)}[task]
    numbers = [ids.captions if side is caption else ids.images for side in sides]
    rows = []
    for _ in range(80):
        first, second = (int(random.integers(0, len(known))) for known in numbers)
        rows.append((first, second, float(random.integers(0, 51)) / 10))
    titles = {"sits": "caption,image", "sts": "caption1,caption2", "sis": "image1,image2"}[task]
    lines = [f"{titles},agg_score,sampling_method"] + [
        f"{sides[0].format(numbers[0][a])},{sides[1].format(numbers[1][b])},{rating},c2i_intrasim"
        for a, b, rating in rows
    ]
    (folder / f"{task}_{split}.csv").write_text("\n".join(lines) + "\n")
    return rows


def test_crisscrossed_captions(tmp_path: Path) -> None:
    random = np.random.default_rng(8)
    images, captions = random.standard_normal((N, 6)), random.standard_normal((M, 6))
    rows = {task: write_ratings(tmp_path, task) for task in ("sits", "sts", "sis")}
    source = EmbeddingScores(images, captions, similarity="dot")
    found = score_truth("cxc", source, OWNERS, tmp_path, IDS, samples=30, seed=4).summary
    right = {(c, i) for c, i, rating in rows["sits"] if rating >= 3}
    of_images = {i: {c for c, other in right if other == i} for _, i in right}
    of_captions = {c: {i for other, i in right if other == c} for c, _ in right}
    expected = plain(images @ captions.T, of_images, of_captions)
    expected = {name: value for name, value in expected.items() if re.fullmatch("..._r[0-9]+", name)}
    sides = {"sits": (captions, images), "sts": (captions, captions), "sis": (images, images)}
    for task, pairs in rows.items():
        scores = [float(sides[task][0][a] @ sides[task][1][b]) for a, b, _ in pairs]
        ratings = [rating for _, _, rating in pairs]
        expected[f"{task}_spearman_all"] = 100 * spearman(ratings, scores)
        queries = sorted({a for a, _, _ in pairs})
        of_query = {query: [n for n, (a, _, _) in enumerate(pairs) if a == query] for query in queries}
        drawn, samples = np.random.default_rng(4), []
        for _ in range(30):
            half = [queries[n] for n in drawn.permutation(len(queries))[: len(queries) // 2]]
            picks = drawn.integers(0, [len(of_query[query]) for query in half])
            chosen = [of_query[query][pick] for query, pick in zip(half, picks, strict=True)]
            samples.append(spearman([ratings[n] for n in chosen], [scores[n] for n in chosen]))
        mean = sum(samples) / 30
        expected[f"{task}_spearman"] = 100 * mean
        expected[f"{task}_spearman_std"] = 100 * (sum((one - mean) ** 2 for one in samples) / 30) ** 0.5
    assert found == pytest.approx(expected, rel=1e-9)
    # A matrix has no scores of captions with captions.
    with pytest.warns(UserWarning, match="needs embeddings$") as caught:
        of_matrix = scored("cxc", tmp_path, images @ captions.T)
    assert [str(line.message).split()[9] for line in caught] == ["STS,", "SIS,"]
    assert of_matrix == pytest.approx({name: v for name, v in expected.items() if not name.startswith(("sts", "sis"))})


def test_the_split_of_crisscrossed_captions_is_that_of_the_scores(tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    source = EmbeddingScores(random.standard_normal((N, 6)), random.standard_normal((M, 6)), similarity="dot")
    others = Ids(IDS.images + 1000, IDS.captions + 100_000)
    both, alone = tmp_path / "both", tmp_path / "alone"
    for folder in (both, alone):
        folder.mkdir()
        for task in ("sits", "sts", "sis"):
            write_ratings(folder, task, "val")
    for task in ("sits", "sts", "sis"):
        write_ratings(both, task, "test", others)
    of_both, of_alone = (
        score_truth("cxc", source, OWNERS, folder, IDS, samples=30).summary for folder in (both, alone)
    )
    assert of_both == of_alone
    assert {name for name in of_both if name.endswith("_all")} == {
        f"{task}_spearman_all" for task in ("sits", "sts", "sis")
    }
    # Of scores of neither split, the message is about the test.
    neither = Ids(IDS.images + 2000, IDS.captions + 200_000)
    with pytest.raises(ValueError, match=r"sits_test\.csv: line 2: .* is not among the numbers of the scores"):
        score_truth("cxc", source, OWNERS, both, neither)
    # A damaged file is not taken for one of another split.
    damaged = both / "sits_test.csv"
    damaged.write_text("a,b,c\n")
    with pytest.raises(ValueError, match=r"sits_test\.csv: expected a third column agg_score"):
        score_truth("cxc", source, OWNERS, both, IDS)


def test_lost_scores_are_the_lowest_of_crisscrossed_captions(tmp_path: Path) -> None:
    rows = write_ratings(tmp_path, "sits")
    scores = table()
    for caption, image, rating in rows:
        if rating > 4:
            scores[image, caption] = np.nan
    assert np.isnan(scores).sum() > 5
    lowest = np.where(np.isnan(scores), scores[~np.isnan(scores)].min() - 1, scores)
    found, expected = (scored("cxc", tmp_path, one) for one in (scores, lowest))
    names = [name for name in expected if "spearman" in name]
    assert names
    assert [found[name] for name in names] == [expected[name] for name in names]


def test_the_protocols_with_files_are_known() -> None:
    assert [name for name, standard in PROTOCOLS.items() if standard.truth] == ["eccv", "cxc", "pmrp"]


def test_numbers_of_images_and_captions(tmp_path: Path) -> None:
    for name, content in {
        "lines.txt": "12\n7\n391895\n",
        "five.txt": "12\n" * 5 + "7\n" * 5 + "391895\n" * 5,
        "names.txt": "COCO_val2014_000000000012.jpg\nval2014/COCO_val2014_000000000007.jpg\n391895.jpg\n",
        "captions.txt": "COCO_val2014:sentid:12\nCOCO_val2014:sentid:7\nCOCO_val2014:sentid:391895\n",
    }.items():
        (tmp_path / name).write_text(content)
        assert read_ids(tmp_path / name, 3, "images").tolist() == [12, 7, 391895], name
    np.save(tmp_path / "ids.npy", [12, 7, 391895])
    assert read_ids(tmp_path / "ids.npy", 3, "images").tolist() == [12, 7, 391895]


def test_bad_files(tmp_path: Path) -> None:
    def refused(name: str, content: str, message: str, call: object) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(tmp_path / name)  # type: ignore[operator]

    ids, path = tmp_path / "ids.txt", tmp_path / "eccv_image_to_caption.json"
    for content, message in (
        ("1\n2\n", f"{ids}: expected one number per line for 3 images, found 2: of another split?"),
        ("1\n2\n2\n", f"{ids}: expected different numbers for 3 images, found 2 2 times"),
        ("1\nx\n2\n", f"{ids}: line 2: expected the number of an image or caption, found 'x'"),
    ):
        refused("ids.txt", content, message, lambda file: read_ids(file, 3, "images"))
    truth_of("eccv", tmp_path)
    for content, message in (
        ('{"1": [2]}', f"{path}: 1 of 1 queries are not among the numbers of the scores, the first is 1: scores of "
         "another split, or images and captions exchanged?"),
        ("{}", f"{path}: expected queries with at least one positive each"),
        ("[1]", f"{path}: expected an object with a list of numbers for each number"),
        ('{"a": [2]}', f"{path}: expected the number of an image or caption, found 'a'"),
    ):  # fmt: skip
        refused(path.name, content, message, lambda _: scored("eccv", tmp_path))
    csv = tmp_path / "sits_test.csv"
    titles = "caption,image,agg_score,sampling_method\n"
    for content, message in (
        ("a,b,c\n", f"{csv}: expected a third column agg_score, found ['a', 'b', 'c']"),
        (titles, f"{csv}: expected rated pairs, found only titles"),
        (titles + "1\n", f"{csv}: line 2: expected two numbers and a rating, found ['1']"),
        (titles + "5,1,3\n", f"{csv}: line 2: '5' is not among the numbers of the scores: ratings of another split?"),
        (titles + f"7,1,{'3' * 2**17}.0\n", f"{csv}: line 2: field larger than field limit (131072)"),
        (titles + '7,1,3,"a\n7,1,3\n', f"{csv}: line 3: unexpected end of data"),
        (titles + "7,1,high\n", f"{csv}: line 2: expected a rating, found 'high'"),
    ):
        refused(csv.name, content, message, lambda file: read_ratings(file, np.array([7]), np.array([1])))
    refused(
        csv.name, titles + f"{IDS.captions[0]},{IDS.images[0]},2.5\n",
        "ratings: expected pairs of a caption and an image rated at least 3, found none",
        lambda _: scored("cxc", tmp_path),
    )  # fmt: skip
    csv.unlink()
    for name, message in (
        ("cxc", "expected sits_test.csv of Crisscrossed Captions, and sts_test.csv and sis_test.csv"),
        ("pmrp", "expected instances_val2014.json of COCO, or pm_image_to_caption.json of ECCV Caption"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path}: {message}')}$"):
            scored(name, tmp_path)
    classes = tmp_path / "instances_val2014.json"
    for content, message in (
        ("{}", f"{classes}: expected the object annotations of COCO, such as instances_val2014.json"),
        ('{"annotations": [{"image_id": 5, "category_id": 1}]}',
         f"{classes}: annotates none of the 10 images: annotations of another split?"),
    ):  # fmt: skip
        refused(classes.name, content, message, lambda _: scored("pmrp", tmp_path))
    class_file(tmp_path)
    with pytest.raises(ValueError, match=r"^images: expected at least one with annotations and captions in each fold$"):
        scored("pmrp", tmp_path, folds=5)
