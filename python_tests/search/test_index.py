"""Searches of an index, compared with scores in plain loops over all items."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import itm_fast
from itm_fast import models
from itm_fast.data import CaptionDataset
from itm_fast.fragments import Fragments
from itm_fast.search import Index, Results, check
from itm_fast.search import writing as writing_module
from python_tests.helpers.processes import HANGS
from python_tests.helpers.search import concepts, files_of, likeness, rounded, scan, scan_score, vsepp

QUERIES = ["red ball dog tree", "car  boat", "sun cup hat fish door lamp"]


@pytest.fixture(scope="module")
def train(data: Path) -> CaptionDataset:
    return concepts(data)


@pytest.fixture(scope="module")
def built(train: CaptionDataset, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Index 24 images and 120 captions; tests that change an index build their own."""
    return Index.build(scan(), train, tmp_path_factory.mktemp("built") / "index")


def ids(results: Results) -> list[str]:
    return [hit.item.id for hit in results.hits]


def rows(model: models.MatchingModel, data: CaptionDataset, dtype: str = "bf16") -> list[np.ndarray]:
    """Return the stored regions of each image, in float64."""
    with torch.no_grad():
        encoded = model.encode_images(torch.from_numpy(np.asarray(data.features)))
    return [rounded(encoded[image], dtype) for image in range(data.n_images)]


def words(model: models.MatchingModel, texts: list[str]) -> list[np.ndarray]:
    encoded = model.encode_captions([" ".join(text.split()) for text in texts])
    return [encoded[number].double().numpy() for number in range(len(texts))]


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_texts_find_images_by_the_published_score(train: CaptionDataset, tmp_path: Path, dtype: str) -> None:
    model = scan()
    index = Index.build(model, train, tmp_path / "index", dtype=dtype, pooling="mean")
    expected = np.array(
        [[scan_score(text, image) for image in rows(model, train, dtype)] for text in words(model, QUERIES)]
    )
    for exact in (True, False):
        found = index.search(QUERIES, 7, exact=exact)
        assert [one.query for one in found] == [" ".join(text.split()) for text in QUERIES]
        for scores, one in zip(expected, found, strict=True):
            assert ids(one) == [f"train{image}" for image in np.argsort(-scores)[:7]]
            assert [hit.rank for hit in one.hits] == list(range(1, 8))
            np.testing.assert_allclose([hit.score for hit in one.hits], np.sort(scores)[::-1][:7], atol=2e-6)
            assert one.scored == 24


def test_a_model_of_several_tensors_per_image_is_refused(
    train: CaptionDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scan()
    encode = type(model).encode_images
    monkeypatch.setattr(type(model), "encode_images", lambda self, features: (encode(self, features),) * 2)
    with pytest.raises(ValueError, match="model: an index keeps one tensor or Fragments per side, but scan encodes as"):
        Index.build(model, train, tmp_path / "index")


def test_few_candidates_are_the_nearest_pooled_vectors(train: CaptionDataset, tmp_path: Path) -> None:
    model = scan()
    index = Index.build(model, train, tmp_path / "index", pooling="mean")
    unit = lambda one: one / (np.linalg.norm(one) + 1e-8)  # noqa: E731
    with torch.no_grad():
        regions = model.encode_images(torch.from_numpy(np.asarray(train.features)))
    means = [unit(regions[image].double().numpy().mean(0)) for image in range(24)]
    images = rows(model, train)
    for text, found in zip(words(model, QUERIES), index.search(QUERIES, 3, candidates=5), strict=True):
        products = [float(unit(text.mean(0)) @ mean) for mean in means]
        nearest = np.argsort(products)[::-1][:5]
        scores = {f"train{image}": scan_score(text, images[image]) for image in nearest}
        assert ids(found) == sorted(scores, key=lambda name: -scores[name])[:3]
        assert found.scored == 5


def test_pictures_find_captions_and_like_pictures(built: Index, train: CaptionDataset) -> None:
    model = scan()
    image = np.asarray(train.features)[3:4]
    with torch.no_grad():
        regions = model.encode_images(torch.from_numpy(image))[0].double().numpy()
    texts = [rounded(torch.from_numpy(one), "bf16") for one in words(model, train.captions)]
    scores = np.array([scan_score(text, regions) for text in texts])
    (found,) = built.search(features=image, k=4)
    # Captions are in the order of their images.
    assert ids(found) == [f"train{number // 5}#{number % 5}" for number in np.argsort(-scores, kind="stable")[:4]]
    assert found.hits[0].item.image == found.hits[0].item.id.partition("#")[0]
    stored = rows(model, train)
    alike = np.array([likeness(regions, other) for other in stored])
    (found,) = built.search(features=image, k=24, of="images")
    np.testing.assert_allclose([hit.score for hit in found.hits], np.sort(alike)[::-1], atol=2e-6)
    assert ids(found)[0] == "train3"
    (found,) = built.search(items=["train3"], k=23, of="images")
    assert built.search(items="train3", k=23, of="images") == [found]
    for nothing in ({"items": []}, {"pictures": []}):
        with pytest.raises(ValueError, match=r"^query: expected at least one$"):
            built.search(**nothing)
    assert "train3" not in ids(found)
    own = np.array([likeness(stored[3], other) for number, other in enumerate(stored) if number != 3])
    np.testing.assert_allclose([hit.score for hit in found.hits], np.sort(own)[::-1], atol=2e-6)


def test_an_ensemble_ranks_by_the_mean_score(train: CaptionDataset, tmp_path: Path) -> None:
    members = [scan(), vsepp(1)]
    index = Index.build(members, train, tmp_path / "index", pooling="mean")
    features = torch.from_numpy(np.asarray(train.features))
    text = words(members[0], QUERIES[:1])[0]
    with torch.no_grad():
        globals_ = members[1].encode_images(features).double().numpy()
        caption = members[1].encode_captions(QUERIES[:1]).double().numpy()[0]
    pairs = zip(rows(members[0], train), globals_, strict=True)
    scores = np.array([(scan_score(text, image) + float(caption @ vector)) / 2 for image, vector in pairs])
    (found,) = index.search(QUERIES[0], 24)
    assert ids(found) == [f"train{image}" for image in np.argsort(-scores)]
    np.testing.assert_allclose([hit.score for hit in found.hits], np.sort(scores)[::-1], atol=2e-6)
    with pytest.raises(ValueError, match="the same model was given twice; an ensemble needs different models"):
        Index.build([scan(), scan()], train, tmp_path / "twice")


def test_a_global_model_needs_no_second_stage(train: CaptionDataset, tmp_path: Path) -> None:
    index = Index.build(vsepp(), train, tmp_path / "index")
    few, all_ = index.search(QUERIES, 5, candidates=5), index.search(QUERIES, 5, exact=True)
    assert [ids(one) for one in few] == [ids(one) for one in all_]
    for left, right in zip(few, all_, strict=True):
        assert [hit.score for hit in left.hits] == pytest.approx([hit.score for hit in right.hits], abs=1e-6)
    assert index.manifest.pooling == "mean"
    assert index.manifest.weights is None


def test_fdf_is_searched_with_its_fused_features(train: CaptionDataset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    host = {"vocab_size": len(train.vocabulary), "feature_dim": 8, "embed_dim": 16, "word_dim": 12}
    model = models.create("fdf", host="chan", host_options=host, conversions=2).eval()
    model.tokenizer = train.vocabulary
    index = Index.build(model, train, tmp_path / "index", pooling="mean")
    regions = [torch.from_numpy(image) for image in rows(model, train)]
    (found,) = index.search(QUERIES[0], 24)
    text = words(model, QUERIES[:1])[0]
    # CHAN: the log-sum-exp over the words of the greatest cosine, with temperature 10.
    cosines = [np.array([max(float(word @ region) for region in image.numpy()) for word in text]) for image in regions]
    norms = [[np.linalg.norm(word) for word in text], [np.linalg.norm(one, axis=1) for one in regions]]
    np.testing.assert_allclose(np.concatenate([norms[0], *norms[1]]), 1, atol=1e-2)
    scores = np.array([np.log(np.exp(10 * row).sum()) / 10 for row in cosines])
    np.testing.assert_allclose([hit.score for hit in found.hits], np.sort(scores)[::-1], atol=1e-2)
    assert [scores[int(name.removeprefix("train"))] for name in ids(found)] == pytest.approx(
        [hit.score for hit in found.hits], abs=1e-2
    )


def test_added_and_deleted_items_are_as_if_built_so(data: Path, train: CaptionDataset, tmp_path: Path) -> None:
    """An index that was changed gives the results of one that was built with the same items."""
    model = scan()
    index = Index.build(model, train, tmp_path / "index", pooling="mean")
    index.add(concepts(data, "dev"))
    assert (index.size("images"), index.size("captions")) == (34, 170)
    gone = [f"train{image}" for image in range(20)]
    assert index.delete([*gone, "dev3#2"]) == 20 + 100 + 1
    features = np.concatenate([np.asarray(train.features)[20:], np.asarray(concepts(data, "dev").features)])
    names = [*(f"train{image}" for image in range(20, 24)), *(f"dev{image}" for image in range(10))]
    other = Index.build(model, features, tmp_path / "other", ids=names)
    for deleted, segments in ((121, 4), (0, 2)):
        assert [item.id for item in index.items()] == names
        assert [one.hits for one in index.search(QUERIES, 14, of="images", exact=True)] == [
            tuple(itm_fast.search.Hit(hit.rank, hit.score, index.item(hit.item.id)) for hit in one.hits)
            for one in other.search(QUERIES, 14, exact=True)
        ]
        assert "dev3#2" not in {item.id for item in index.items("captions")}
        assert not files_of(tmp_path / "index")
        assert (index.info()["deleted"], index.info()["segments"]) == (deleted, segments)
        index.compact()
    assert index.info()["deleted"] == 0
    assert check(tmp_path / "index") == []


def test_many_additions_make_few_files(train: CaptionDataset, tmp_path: Path) -> None:
    features = np.asarray(train.features)
    index = Index.build(scan(), features[:1], tmp_path / "index", ids=["0"])
    for number in range(1, 70):
        index.add(features[number % 24][None], ids=[str(number)])
        if number % 3 == 0:
            index.delete([str(number - 1)])
    assert len(index.manifest.segments) <= 5
    assert index.size() == 70 - 23
    index.compact()
    alone = Index.build(scan(), features[[int(item.id) % 24 for item in index.items()]], tmp_path / "alone",
                        ids=[item.id for item in index.items()])  # fmt: skip
    size = {index.path: sum(file.stat().st_size for file in index.path.glob("images-*")) for index in (index, alone)}
    assert size[index.path] == size[alone.path]
    assert len(index.manifest.segments) == 1
    before = index.manifest
    index.compact()
    assert index.manifest == before


def test_segments_of_bounded_size_hold_the_same_items(
    train: CaptionDataset, tmp_path: Path, built: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_module, "SEGMENT_BYTES", 4000)
    index = Index.build(scan(), train, tmp_path / "index", batch_size=5)
    assert len(index.manifest.segments) > 10
    assert [one.hits for one in index.search(QUERIES, 9)] == [one.hits for one in built.search(QUERIES, 9)]
    before = index.manifest.segments
    index.compact()
    assert set(index.manifest.segments) & set(before), "complete segments are not written again"
    assert [one.hits for one in index.search(QUERIES, 9)] == [one.hits for one in built.search(QUERIES, 9)]


def test_ragged_features_and_captions_to_show(train: CaptionDataset, tmp_path: Path) -> None:
    features = torch.from_numpy(np.asarray(train.features))
    ragged = Fragments.from_list([features[image, : 1 + image % 4] for image in range(24)])
    index = Index.build(scan(), ragged, tmp_path / "index", captions=[f"number {image}" for image in range(24)])
    model = scan()
    with torch.no_grad():
        encoded = model.encode_images(ragged)
    text = words(model, QUERIES[:1])[0]
    scores = np.array([scan_score(text, rounded(encoded[image], "bf16")) for image in range(24)])
    (found,) = index.search(QUERIES[0], 24)
    assert ids(found) == [str(image) for image in np.argsort(-scores)]
    np.testing.assert_allclose([hit.score for hit in found.hits], np.sort(scores)[::-1], atol=2e-6)
    assert found.hits[0].item.captions == (f"number {np.argmax(scores)}",)


def test_an_explanation_is_that_of_the_pair(built: Index, train: CaptionDataset) -> None:
    found = built.explain("red ball", "train5")
    assert found.words == ["<start>", "red", "ball", "<end>"]
    regions = rows(scan(), train)[5]
    text = words(scan(), ["red ball"])[0]
    assert found.score == pytest.approx(scan_score(text, regions), abs=2e-6)
    assert found.directions["t2i"].attention[-1].shape == (4, 4)
    for member in (1, -1):
        with pytest.raises(ValueError, match=f"^member: the index has 1 models, counted from 0; got {member}$"):
            built.explain("red ball", "train5", member)


def test_readers_go_on_during_changes(train: CaptionDataset, tmp_path: Path) -> None:
    """Threads search while the index is changed; each sees one whole state, and none an error."""
    index = Index.build(scan(), np.asarray(train.features), tmp_path / "index")
    reader = Index.open(tmp_path / "index", scan())
    before = reader.search(QUERIES, 5)
    known = {str(number) for number in range(24)}

    def read() -> int:
        searches = 0
        while not done.is_set():
            try:
                reader.reload()
                (found,) = reader.search(QUERIES[0], 20, exact=True)
            except BaseException:
                started.abort()
                raise
            names = {hit.item.id for hit in found.hits}
            assert len(names) == 20
            assert names <= known
            searches += 1
            if searches == 1:
                started.wait(HANGS)
        return searches

    # The changes begin when both readers have searched once.
    started, done = threading.Barrier(3), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        started.wait(HANGS)
        for number in range(6):
            index.delete([str(number % 3)])
            index.add(np.asarray(train.features)[number % 3][None], ids=[str(number % 3)])
            index.compact()
        done.set()
        assert min(one.result() for one in reading) > 0
    # The last change may have been made after the last search.
    reader.reload()
    assert reader.search(QUERIES, 5)[0].hits == before[0].hits
    assert reader.reload() is False


def test_an_open_index_keeps_its_state_until_reload(train: CaptionDataset, tmp_path: Path) -> None:
    index = Index.build(scan(), train, tmp_path / "index", pooling="mean")
    reader = Index.open(tmp_path / "index", scan())
    before = reader.search(QUERIES, 5)
    assert not reader.is_stale()
    index.delete(["train0"])
    index.compact()
    assert reader.is_stale()
    assert reader.search(QUERIES, 5) == before
    assert reader.size() == 24
    assert reader.reload()
    assert reader.size() == 23
    Index.build(vsepp(), train, tmp_path / "index", overwrite=True, pooling="mean")
    with pytest.raises(ValueError, match="the index was replaced by one of another model; open it again"):
        reader.reload()
    assert reader.size() == 23


def test_a_revision_tells_indexes_of_one_generation_apart(train: CaptionDataset, tmp_path: Path) -> None:
    features = np.asarray(train.features)
    built = [Index.build(scan(), features[part], tmp_path / str(part[1])) for part in ([0, 1], [0, 2])]
    assert [index.manifest.generation for index in built] == [1, 1]
    revisions = [index.snapshot.revision for index in built]
    assert [len(one) for one in revisions] == [16, 16]
    assert Index.open(built[0].path).snapshot.revision == revisions[0]
    built[0].set_candidates(7)
    assert len({built[0].snapshot.revision, *revisions}) == 3


def test_a_reader_that_meets_a_removed_file_reads_the_manifest_again(
    train: CaptionDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from itm_fast.search import opened as opened_module

    index = Index.build(scan(), train, tmp_path / "index", pooling="mean")
    read = opened_module.read_manifest
    reads = []

    def changed_meanwhile(path: Path) -> object:
        manifest = read(path)
        reads.append(manifest)
        if len(reads) == 1:
            index.delete([f"train{number}" for number in range(5)])
            index.compact()
        return manifest

    monkeypatch.setattr(opened_module, "read_manifest", changed_meanwhile)
    assert Index.open(tmp_path / "index").size() == 19
