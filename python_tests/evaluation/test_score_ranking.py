"""Protocols, intervals, tests and warnings for given scores equal obvious loops over the whole matrix."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from itm_fast.evaluation import ranking
from itm_fast.evaluation.bootstrap import compare, intervals
from itm_fast.evaluation.measures import Measures
from itm_fast.evaluation.ranking import rank_folds, saved_rankings, summarize
from itm_fast.evaluation.score_protocols import score_protocol
from itm_fast.evaluation.score_sources import MatrixScores
from itm_fast.evaluation.standards import PROTOCOLS, check_sizes, folds_of
from itm_fast.evaluation.suspicion import Look, suspicions
from python_tests.helpers.plain_retrieval import fold_means, ranked, standard
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process

OWNERS = torch.arange(60) // 5


def table(seed: int = 0, shift: float = 1.5) -> np.ndarray:
    """Return scores (12, 60) whose matching pairs are higher on average, with ties."""
    random = np.random.default_rng(seed)
    scores = random.standard_normal((12, 60)).round(1)
    scores[OWNERS.numpy(), np.arange(60)] += shift
    return scores


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("folds", [1, 3])
def test_the_summary_is_that_of_plain_loops(dtype: str, folds: int) -> None:
    scores = table().astype(dtype)
    expected = fold_means(scores.tolist(), OWNERS.tolist(), folds)
    found = score_protocol("full", MatrixScores(scores), OWNERS, folds=folds)
    assert found.summary == pytest.approx(expected, rel=1e-12)
    values = dict(zip(found.measures.names, found.measures.values(), strict=True))
    assert values == pytest.approx({name: expected[name] for name in values}, rel=1e-12)
    assert set(expected) - set(values) == {"i2t_medr", "t2i_medr", "mean_distance"}


@given(data=st.data())
def test_tiles_of_any_size_captions_in_any_order(data: st.DataObject) -> None:
    """Few different scores, including NaN; images without captions; rankings and warnings are those of one tile."""
    n_images = data.draw(st.integers(2, 6))
    owners = torch.tensor(data.draw(st.lists(st.integers(0, n_images - 1), min_size=1, max_size=12)))
    values = st.sampled_from([0.0, 1.0, 2.0, float("nan"), -float("inf")])
    size = n_images * len(owners)
    scores = np.array(data.draw(st.lists(values, min_size=size, max_size=size))).reshape(n_images, -1)
    sizes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    found, seen = [], []
    for rows, columns in (sizes, (100, 100)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranking, "TILE_IMAGES", rows)
            patch.setattr(ranking, "TILE_CAPTIONS", columns)
            look = Look(n_images, len(owners))
            rankings = rank_folds(MatrixScores(scores), owners, top=3, look=look)
            found.append(saved_rankings(rankings))
            seen.append(suspicions(MatrixScores(scores), owners, look, [rankings[0].ranks]))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[1])
    assert [line.partition(", the first")[0] for line in seen[0]] == [
        line.partition(", the first")[0] for line in seen[1]
    ]
    for caption, owner in enumerate(owners.tolist()):
        order = ranked(scores[:, caption].tolist(), {owner})
        assert found[0]["text_to_image"][caption] == order.index(owner)


def test_best_matches_of_a_fold_are_indices_of_the_whole(tmp_path: Path) -> None:
    scores = table()
    saved = saved_rankings(rank_folds(MatrixScores(scores), OWNERS, folds=3, top=7))
    assert saved["images"].tolist() == list(range(12))
    assert saved["captions"].tolist() == list(range(60))
    for image in range(12):
        inside = [caption for caption in range(60) if caption // 20 == image // 4]
        order = sorted(inside, key=lambda caption: (-scores[image, caption], caption))
        assert saved["best_captions"][image].tolist() == order[:7]
    for caption in range(60):
        inside = range(caption // 20 * 4, caption // 20 * 4 + 4)
        order = sorted(inside, key=lambda image: (-scores[image, caption], image))
        assert saved["best_images"][caption].tolist() == order


def test_optimistic_ties() -> None:
    scores = np.zeros((12, 60))
    for ties, recall in (("pessimistic", 0.0), ("optimistic", 100.0)):
        summary = summarize(rank_folds(MatrixScores(scores), OWNERS, ties=ties))
        assert summary["t2i_r1"] == summary["i2t_r1"] == recall


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (OWNERS + 1, "caption_image: expected images from 0 to 11, got 12 for caption 55"),
        (OWNERS - 1, "caption_image: expected images from 0 to 11, got -1 for caption 0"),
        (OWNERS[:55], "caption_image: expected shape (60,) as many as there are captions, got (55,)"),
        (torch.arange(65) // 6, "caption_image: expected shape (60,) as many as there are captions, got (65,)"),
    ],
)
def test_owners_that_do_not_fit_the_scores(owners: torch.Tensor, message: str) -> None:
    for chosen in ({}, {"first_images": 6}):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            score_protocol("full", MatrixScores(table()), owners, **chosen)


def test_owners_may_be_an_array_or_a_list() -> None:
    found = score_protocol("full", MatrixScores(table()), OWNERS)
    for owners in (OWNERS.tolist(), OWNERS.numpy().astype(np.uint16)):
        one = score_protocol("full", MatrixScores(table()), owners)
        assert one.summary == found.summary
        assert np.array_equal(one.measures.values(), found.measures.values())
    with pytest.raises(TypeError, match=r"^caption_image: expected integers, got torch.float64$"):
        score_protocol("full", MatrixScores(table()), OWNERS.numpy() / 5)


# Intervals and tests


def test_options_of_a_protocol() -> None:
    with pytest.raises(ValueError, match="ties: expected one of 'pessimistic', 'optimistic', got 'some'"):
        score_protocol("full", MatrixScores(table()), OWNERS, ties="some")
    for name in ("eccv", "cxc", "pmrp"):
        message = f"protocol {name}: its positives are in files; use evaluation.score_truth.score_truth"
        with pytest.raises(ValueError, match=f"^{message}$"):
            score_protocol(name, MatrixScores(table()), OWNERS)


def resampled(scores: np.ndarray, drawn: list[int]) -> dict[str, float]:
    """The measures of the images `drawn`, with repetitions, among all images and captions."""
    hits: dict[str, list[float]] = {}
    for image in drawn:
        own = {caption for caption in range(60) if caption // 5 == image}
        order = ranked(scores[image].tolist(), own)
        rank = next(place for place, caption in enumerate(order) if caption in own)
        ranks = {"i2t": [rank], "t2i": []}
        for caption in own:
            ranks["t2i"].append(ranked(scores[:, caption].tolist(), {image}).index(image))
        for prefix, found in ranks.items():
            for k in (1, 5, 10):
                hits.setdefault(f"{prefix}_r{k}", []).extend(100.0 * (one < k) for one in found)
            hits.setdefault(f"{prefix}_meanr", []).extend(one + 1.0 for one in found)
    values = {name: sum(found) / len(found) for name, found in hits.items()}
    values["rsum"] = sum(value for name, value in values.items() if name[4] == "r")
    return values


def measures_of(scores: np.ndarray) -> Measures:
    return score_protocol("full", MatrixScores(scores), OWNERS).measures


def test_intervals_are_those_of_resampled_images() -> None:
    scores = table()
    random = np.random.default_rng([3, 0])
    drawn = [resampled(scores, random.integers(0, 12, 12).tolist()) for _ in range(40)]
    found = intervals(measures_of(scores), samples=40, seed=3)
    assert set(found) == set(drawn[0])
    for name, (low, high) in found.items():
        values = sorted(sample[name] for sample in drawn)
        expected = []
        for share in (0.025, 0.975):
            place = share * 39
            below = int(place)
            expected.append(values[below] + (place - below) * (values[min(below + 1, 39)] - values[below]))
        assert (low, high) == pytest.approx(expected), name


def test_no_samples_give_no_intervals() -> None:
    assert intervals(measures_of(table()), samples=0) == {}


def test_images_without_captions_are_not_drawn() -> None:
    """A sample of such images alone would have no queries, so no recalls."""
    scores, owners = table()[:, :6], torch.tensor([0, 0, 0, 7, 7, 7])
    two = [score_protocol("full", MatrixScores(one), owners).measures for one in (scores, -scores)]
    ends = intervals(two[0], samples=50)
    assert all(low <= high for low, high in ends.values())
    random = np.random.default_rng([0, 0])
    drawn = []
    for _ in range(50):
        weights = np.zeros(12)
        weights[[0, 7]] = np.bincount(random.integers(0, 2, 2), minlength=2)
        drawn.append(two[0].values(weights)[two[0].names.index("rsum")])
    assert ends["rsum"] == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))
    compared = compare(*two, samples=50, permutations=5)
    assert all(one.lowest <= one.highest for one in compared.values())


def test_folds_are_resampled_by_themselves() -> None:
    found = score_protocol("full", MatrixScores(table()), OWNERS, folds=3).measures
    random = np.random.default_rng([0, 0])
    weights = np.concatenate([np.bincount(random.integers(0, 4, 4), minlength=4) for _ in range(3)])
    (low, high) = intervals(found, samples=1)["rsum"]
    expected = found.values(weights.astype(float))[found.names.index("rsum")]
    assert low == high == pytest.approx(expected)


def test_a_comparison_is_that_of_plain_loops() -> None:
    first, second = table(), table() + 0.4 * table(1, 0.0)
    found = compare(measures_of(first), measures_of(second), samples=40, permutations=50, seed=3)
    random = np.random.default_rng([3, 0])
    drawn = []
    for _ in range(40):
        images = random.integers(0, 12, 12).tolist()
        ones, others = resampled(first, images), resampled(second, images)
        drawn.append({name: ones[name] - others[name] for name in ones})
    everything = list(range(12))
    ones, others = resampled(first, everything), resampled(second, everything)
    by_image = [(resampled(first, [image]), resampled(second, [image])) for image in everything]
    random = np.random.default_rng([3, 1])
    signs = [random.choice(np.array([-1.0, 1.0]), 12) for _ in range(50)]
    for name, one in found.items():
        assert (one.first, one.second) == pytest.approx((ones[name], others[name]))
        assert one.difference == pytest.approx(ones[name] - others[name])
        values = np.quantile([sample[name] for sample in drawn], [0.025, 0.975])
        assert (one.lowest, one.highest) == pytest.approx(tuple(values)), name
        exchanged = [
            abs(sum(sign * (a[name] - b[name]) for sign, (a, b) in zip(flips, by_image, strict=True)) / 12)
            for flips in signs
        ]
        larger = sum(value >= abs(one.difference) - 1e-9 for value in exchanged)
        assert one.p == pytest.approx((1 + larger) / 51), name


def test_equal_matrices_do_not_differ() -> None:
    found = compare(measures_of(table()), measures_of(table()), samples=5, permutations=5)
    assert {(one.lowest, one.highest, one.p) for one in found.values()} == {(0.0, 0.0, 1.0)}


# Warnings


def warnings_of(scores: np.ndarray, owners: torch.Tensor = OWNERS) -> list[str]:
    look = Look(*scores.shape)
    rankings = rank_folds(MatrixScores(scores), owners, look=look)
    return suspicions(MatrixScores(scores), owners, look, [fold.ranks for fold in rankings])


def test_sound_scores_give_no_warning() -> None:
    random = np.random.default_rng(0)
    assert warnings_of(random.standard_normal((12, 60))) == []
    scores = random.standard_normal((12, 60))
    scores[OWNERS.numpy(), np.arange(60)] += 2
    assert warnings_of(scores) == []


def test_what_is_suspicious() -> None:
    random = np.random.default_rng(0)
    sound = random.standard_normal((12, 60))
    sound[OWNERS.numpy(), np.arange(60)] += 2

    lost = sound.copy()
    lost[3, [4, 9]] = np.nan
    lost[5, 1] = np.inf
    assert warnings_of(lost) == [
        "scores that are NaN: 2, the first of image 3 and caption 4; they count as the lowest",
        "scores that are infinite: 1",
    ]
    constant = sound.copy()
    constant[7] = 0.5
    constant[:, 2] = 0.25
    assert warnings_of(constant)[:1] == [
        "captions that have the same score with all images: 1, the first is caption 2: were all rows and columns "
        "filled?"
    ]
    constant = sound.copy()
    constant[[7, 9]] = 0.5
    assert warnings_of(constant) == [
        "images that have the same score with all captions: 2, the first is image 7: were all rows and columns filled?"
    ]
    assert warnings_of(sound[:, ::5].copy(), torch.arange(12)) == [
        "captions per image: 1; the published data sets have 5"
    ]
    # The first caption of all images comes before the second of any.
    rounds = sound.reshape(12, 12, 5).transpose(0, 2, 1).reshape(12, 60)
    assert warnings_of(rounds) == [
        "caption j scores higher with image j % 12 than with its own: are the captions in rounds, the first caption of "
        "all images before the second of any? Then give the image of each caption. Or was a matrix of captions x "
        "images reshaped in place of transposed?"
    ]
    # Captions as rows, reshaped, look the same.
    assert warnings_of(sound.T.copy().reshape(12, 60)) == warnings_of(rounds)
    (line,) = warnings_of(-sound)
    assert line.startswith("matching pairs score ")
    assert line.endswith(
        "lower than others on average: are these distances, or captions in another order than the images?"
    )
    # Images in another order than their captions: as at random. Few captions may be so by chance.
    many = random.standard_normal((120, 600))
    owners = torch.arange(600) // 5
    many[owners.numpy(), np.arange(600)] += 2
    assert warnings_of(many, owners) == []
    for size in (32, 64):
        blocks = many.copy()
        for row in range(0, 120 - size + 1, size):
            for column in range(0, 600 - size + 1, size):
                place = np.s_[row : row + size, column : column + size]
                blocks[place] = many[place].T
        assert warnings_of(blocks, owners) == [
            f"with each block of {size} x {size} scores transposed, matching pairs score higher: were the scores of a "
            "block stored as captions x images?"
        ]
    assert warnings_of(np.roll(many, 1, axis=0), owners) == [
        "matching pairs score no higher than others on average: are the captions, or the numbers of their images, in "
        "another order, or is the model not trained?"
    ]
    assert warnings_of(np.roll(sound, 1, axis=0)) == []
    rounded = (sound > 0).astype(float)
    own = [[rounded[image, 5 * image : 5 * image + 5].max() for image in range(12)], rounded[OWNERS, range(60)]]
    others = [
        [np.delete(rounded[image], range(5 * image, 5 * image + 5)) for image in range(12)],
        [np.delete(rounded[:, caption], caption // 5) for caption in range(60)],
    ]
    tied = [sum(value in rest for value, rest in zip(*pair, strict=True)) for pair in zip(own, others, strict=True)]
    assert tied[0] > 6
    assert tied[1] > 30
    assert warnings_of(rounded) == [
        f"for {count} of {total} {kind}, other pairs tie with the matching one; ties count as errors: are the scores "
        "rounded or saturated, or saved in half precision?"
        for kind, count, total in (("images", tied[0], 12), ("captions", tied[1], 60))
    ]


# Protocols


def test_the_protocols_check_their_sizes() -> None:
    for name, images, captions in (("f30k", 1000, 5000), ("f30k", 1014, 5070), ("coco1k", 5000, 25_000)):
        check_sizes(name, images, captions)
    check_sizes("full", 7, 7)
    check_sizes("coco5k", 5000, 25_010, any_captions=True)
    whole = "all 5,000 images of the test split of COCO"
    for arguments, message in (
        (("coco5k", 1000, 5000), f"protocol coco5k: expected {whole}; found 1,000 images and 5,000 captions: one fold "
         "of COCO, or Flickr30K? --protocol full evaluates any split"),
        (("f30k", 5000, 25_000), "protocol f30k: expected the test split of Flickr30K (1,000), or its validation split "
         "(1,014); found 5,000 images and 25,000 captions: COCO? --protocol full evaluates any split"),
        (("coco1k", 5000, 25_010), "protocol coco1k: expected 25,000 captions, 5 per image; found 5,000 images and "
         "25,010 captions: keep the first 5 captions of each image, or give the image of each caption"),
        (("coco1k", 777, 3885), f"protocol coco1k: expected {whole}, in five folds; found 777 images and 3,885 "
         "captions: another split? --protocol full evaluates any split"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_sizes(*arguments)


def test_the_folds_of_the_protocols() -> None:
    assert {name: folds_of(name, None) for name in PROTOCOLS} == {
        name: 1 + 4 * (name == "coco1k") for name in PROTOCOLS
    }
    assert folds_of("full", 3) == 3
    for name, message in (
        ("coco5k", "protocol coco5k: has 1 fold, got folds 2; use protocol full"),
        ("coco1k", "protocol coco1k: has 5 folds, got folds 2; use protocol full"),
        ("coco", "protocol: expected full, f30k, coco1k, coco5k, eccv, cxc, pmrp, got 'coco'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            folds_of(name, 2)


MEMORY = """
import sys
from pathlib import Path
import numpy as np
import torch
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.evaluation.opening import open_embeddings
from itm_fast.evaluation.score_protocols import score_protocol
from itm_fast.evaluation.suspicion import Look

class Counted:
    # Scores of a source, and the largest number of bytes of its tiles that are alive at a time.
    def __init__(self, source):
        self.source, self.n_images, self.n_captions = source, source.n_images, source.n_captions
        self.largest = 0
        self.pairs = source.pairs
    def tile(self, images, captions):
        tile = self.source.tile(images, captions)
        self.largest = max(self.largest, tile.nbytes)
        return tile

folder = sys.argv[1]
random = np.random.default_rng(0)
np.save(f"{folder}/images.npy", random.standard_normal((2500, 4), np.float32))
np.save(f"{folder}/captions.npy", random.standard_normal((12500, 4), np.float32))
source = Counted(open_embeddings(Path(folder, "images.npy"), Path(folder, "captions.npy")).source)
owners = torch.arange(12500) // 5
score_protocol("full", source, owners, folds=100)
before = status_bytes("VmHWM")
result = score_protocol("full", source, owners, look=Look(2500, 12500))
print(source.largest, (status_bytes("VmHWM") - before) // 1024, result.summary["t2i_meanr"])
"""


def test_embeddings_are_scored_in_a_fraction_of_the_memory_of_their_matrix(tmp_path: Path) -> None:
    done = run_process(
        [sys.executable, "-c", MEMORY, str(tmp_path)], cwd=ROOT, OMP_NUM_THREADS=1, MALLOC_MMAP_THRESHOLD_=2**20
    )
    assert done.returncode == 0, done.stderr
    largest, kilobytes, rank = done.stdout.split()
    assert int(largest) == 256 * 1024 * 4
    assert int(kilobytes) < 40_000, "of 125 MB of float32 scores"
    # Scores at random: the mean rank is that of the middle. Its standard error is 2500 / sqrt(12 * 12500) = 6.5.
    assert abs(float(rank) - 1250) < 5 * 6.5


def test_the_plain_loops_know_ties() -> None:
    assert ranked([1.0, 2.0, 1.0, float("nan")], {0}) == [1, 2, 0, 3]
    summary = standard([[1.0, 0.0], [1.0, 0.0]], [0, 1])
    assert (summary["i2t_r1"], summary["t2i_r1"]) == (50.0, 0.0)
