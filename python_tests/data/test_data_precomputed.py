"""The published layout: matching of captions and images, content of batches, and messages about bad files."""

from __future__ import annotations

import multiprocessing
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from itm_fast.data import CaptionDataset, PrecomputedDataset
from itm_fast.data.layout import available_splits
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split


def opened(directory, split="test", **options):
    return PrecomputedDataset(directory, split, VOCABULARY, **options)


def assert_batches(dataset, images, owners):
    """Check that every caption has the features of its image, in any order and with repetitions."""
    assert dataset.n_images == len(images)
    assert dataset.features.shape == images.shape
    assert dataset.caption_image.tolist() == list(owners)
    asked = [*reversed(range(len(dataset))), 0, len(dataset) - 1, 0]
    batch = dataset.batch(asked)
    assert batch.features.dtype == torch.float32
    np.testing.assert_array_equal(batch.features.numpy(), images[[owners[index] for index in asked]])
    assert batch.image_index.tolist() == [owners[index] for index in asked]
    assert batch.caption_index.tolist() == asked
    for row, length, caption in zip(batch.token_ids, batch.lengths, asked, strict=True):
        expected = VOCABULARY.encode(dataset.captions[caption])
        assert row.tolist() == expected + [VOCABULARY.pad] * (batch.token_ids.shape[1] - len(expected))
        assert length == len(expected)


@pytest.mark.parametrize("split", ["train", "dev", "test", "testall"])
def test_images_stored_once_have_five_captions_each(tmp_path, split):
    images = features_of(4)
    captions = write_split(tmp_path, split, images, 20)
    dataset = opened(tmp_path, split)
    assert dataset.captions == [caption.strip() for caption in captions]
    assert isinstance(dataset.features, np.memmap)
    assert_batches(dataset, images, [index // 5 for index in range(20)])


def test_images_stored_five_times_count_once(tmp_path):
    images = features_of(40)
    write_split(tmp_path, "test", np.repeat(images, 5, axis=0), 200)
    dataset = opened(tmp_path)
    assert isinstance(dataset.features, np.memmap)
    assert_batches(dataset, images, [index // 5 for index in range(200)])


def test_nan_in_repeated_rows_is_refused_only_when_read(tmp_path):
    images = features_of(2)
    images[1, 0, 0] = np.nan
    write_split(tmp_path, "test", np.repeat(images, 5, axis=0), 10)
    dataset = opened(tmp_path)
    np.testing.assert_array_equal(dataset.image_batch([0]).numpy(), images[:1])
    with pytest.raises(ValueError, match=r"test_ims\.npy: row 5 holds values that are not finite"):
        dataset.batch([3, 7])


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1))))
def test_cap2im_gives_any_number_of_captions_per_image(tmp_path_factory, drawn):
    n_images, owners = drawn
    directory = tmp_path_factory.mktemp("cap2im")
    images = features_of(n_images)
    write_split(directory, "test", images, len(owners), cap2im=owners)
    assert_batches(opened(directory), images, owners)


def test_cap2im_has_priority_over_the_default_matching(tmp_path):
    images = features_of(5)
    write_split(tmp_path, "test", images, 5, cap2im=[4, 3, 2, 1, 0])
    assert_batches(opened(tmp_path), images, [4, 3, 2, 1, 0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_float_types_and_memory_orders_are_read_as_float32(tmp_path, dtype, order):
    images = np.asarray(features_of(3, dtype=dtype), order=order)
    write_split(tmp_path, "test", images, 15)
    batch = opened(tmp_path).image_batch([2, 0])
    assert batch.dtype == torch.float32
    assert batch.is_contiguous()
    np.testing.assert_array_equal(batch.numpy(), images[[2, 0]].astype(np.float32))


def test_max_images_keeps_the_first_images_with_their_captions(tmp_path):
    images = features_of(5)
    write_split(tmp_path, "dev", images, 7, cap2im=[4, 0, 1, 1, 3, 2, 0], ids="abcde")
    dataset = opened(tmp_path, "dev", max_images=2)
    assert dataset.captions == [f"Caption {i} {'caption ' * (i % 4)}." for i in (1, 2, 3, 6)]
    assert dataset.image_ids == ["a", "b"]
    assert_batches(dataset, images[:2], [0, 1, 1, 0])
    assert opened(tmp_path, "dev", max_images=9).n_images == 5
    with pytest.raises(ValueError, match="max_images: expected at least 1, got 0"):
        opened(tmp_path, "dev", max_images=0)


@pytest.mark.parametrize("repeat", [1, 5])
def test_ids_name_images_once_per_image_row_or_caption(tmp_path, repeat):
    images = np.repeat(features_of(2), repeat, axis=0)
    for lines in (["x", "y"], ["x"] * 5 + ["y"] * 5):
        write_split(tmp_path, "test", images, 10, ids=lines)
        assert opened(tmp_path).image_ids == ["x", "y"]
    write_split(tmp_path, "test", images, 10, ids=range(10))
    assert opened(tmp_path).image_ids is None


def test_a_split_without_ids_has_none(tmp_path):
    write_split(tmp_path, "test", features_of(2), 10)
    assert opened(tmp_path).image_ids is None


def test_captions_keep_other_separators(tmp_path):
    write_split(tmp_path, "test", features_of(1), 5)
    lines = ["\ufeffa\u2028b", "c\x0bd", "  é\x85f ", "g\rh", "last"]
    (tmp_path / "test_caps.txt").write_bytes("\r\n".join(lines).encode())
    assert opened(tmp_path).captions == ["a\u2028b", "c\x0bd", "é\x85f", "g\rh", "last"]


def test_a_copy_for_another_process_maps_the_file_again(tmp_path):
    images = features_of(64, k=36, f=64)
    write_split(tmp_path, "test", np.repeat(images, 5, axis=0), 320)
    dataset = opened(tmp_path, max_images=50)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < images.nbytes / 10
    copy = pickle.loads(pickled)
    assert isinstance(copy.features, np.memmap)
    assert torch.equal(copy.batch([249, 3]).features, dataset.batch([249, 3]).features)
    np.testing.assert_array_equal(copy.image_batch([49]).numpy(), images[49:50])


def _sum_in_a_process(dataset):
    return float(dataset.batch([9]).features.sum())


def test_a_data_set_can_be_sent_to_a_spawned_process(tmp_path):
    images = features_of(2)
    write_split(tmp_path, "test", images, 10)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sum_in_a_process, (opened(tmp_path),)) == images[1].sum()


def test_available_splits_have_features_and_captions(tmp_path):
    for split in ("train", "testall"):
        write_split(tmp_path, split, features_of(1), 5)
    np.save(tmp_path / "dev_ims.npy", features_of(1))
    assert available_splits(tmp_path) == ["testall", "train"]


def test_features_are_read_on_demand(tmp_path):
    # A sparse file of 80 GB: mapping it costs nothing, reading it would not fit in memory.
    shape = (10_000_000, 1, 2048)
    header = np.lib.format.header_data_from_array_1_0(np.empty((1, 1, 2048), np.float32)) | {"shape": shape}
    with (tmp_path / "test_ims.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * int(np.prod(shape)))
    write = "caption\n" * 3
    (tmp_path / "test_caps.txt").write_text(write, encoding="utf-8")
    (tmp_path / "test_cap2im.txt").write_text("0\n9999999\n5\n", encoding="utf-8")
    dataset = opened(tmp_path)
    assert dataset.n_images == 10_000_000
    assert dataset.batch([1, 0]).features.abs().sum() == 0


# Bad input: every message is one line that begins with the file.


def refused(directory, file, message, **options):
    with pytest.raises(ValueError, match=f"^{re.escape(str(directory / file))}: {message}") as error:
        opened(directory, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("n_rows", "n_captions"), [(4, 19), (4, 21), (4, 4), (4, 6), (10, 30)])
def test_counts_that_do_not_match_are_reported(tmp_path, n_rows, n_captions):
    write_split(tmp_path, "test", features_of(n_rows), n_captions)
    message = (
        f"{n_captions} captions do not fit {n_rows} rows of test_ims.npy: expected {5 * n_rows} \\(five per image\\) "
        f"or {n_rows} \\(images repeated five times\\); otherwise write test_cap2im.txt with one image row per caption "
        "line"
    )
    refused(tmp_path, "test_caps.txt", message)


def test_one_row_per_caption_without_repetition_is_refused(tmp_path):
    rows = np.repeat(features_of(20), 5, axis=0)
    rows[99] += 1
    write_split(tmp_path, "test", rows, 100)
    message = (
        r"as many rows as captions \(100\), but rows 95 to 99 are not one image repeated five times: write test_cap"
    )
    refused(tmp_path, "test_ims.npy", message)


def test_a_missing_split_lists_the_available_ones(tmp_path):
    for split in ("train", "dev"):
        write_split(tmp_path, split, features_of(1), 5)
    refused(tmp_path, "test_ims.npy", r"no such file, so there is no split 'test' \(splits in .*: dev, train\)")
    np.save(tmp_path / "test_ims.npy", features_of(1))
    refused(tmp_path, "test_caps.txt", r"no such file, so there is no split 'test'")


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such data directory"):
        opened(tmp_path / "nowhere")


def _npy(array, **save):
    return lambda path: np.save(path, array, **save)


def _cut(count):
    def write(path):
        np.save(path, features_of(4))
        path.write_bytes(path.read_bytes()[:count])

    return write


NOT_READABLE = r"not a readable \.npy array of numbers \(.*; \d+ bytes on disk\)"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_cut(-1), "truncated: the header promises 320 bytes, the file has 319$"),
        (_cut(128), "truncated: the header promises 320 bytes, the file has 128$"),
        (_cut(60), NOT_READABLE),
        (_cut(5), NOT_READABLE),
        (_cut(0), NOT_READABLE),
        (lambda path: path.write_text("no array", encoding="utf-8"), NOT_READABLE),
        (_npy(np.array([[[{}]]], dtype=object), allow_pickle=True), NOT_READABLE),
        (lambda path: np.savez(path.open("wb"), features_of(1)), r"expected one \.npy array, got NpzFile"),
        (lambda path: path.write_bytes(b"PK\x03\x04, and then no archive"), NOT_READABLE),
        (_npy(features_of(4)[0]), r"expected features of shape \(images, regions, channels\), got shape \(3, 4\)"),
        (_npy(features_of(4)[None]), r"expected features of shape .*, got shape \(1, 4, 3, 4\)"),
        (_npy(features_of(4).astype(np.int64)), "expected float16, float32 or float64 features, got int64"),
        (_npy(features_of(4).astype(np.complex64)), "expected float16, float32 or float64 features, got complex64"),
        (_npy(features_of(4)[:0]), r"expected at least one image, region and channel, got shape \(0, 3, 4\)"),
        (_npy(features_of(4)[:, :, :0]), r"expected at least one image, region and channel, got shape \(4, 3, 0\)"),
    ],
)
def test_bad_features_are_refused(tmp_path, write, message):
    write_split(tmp_path, "test", features_of(4), 20)
    write(tmp_path / "test_ims.npy")
    refused(tmp_path, "test_ims.npy", message)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_reading_a_row_with_nan_or_infinity_names_it(tmp_path, value):
    images = features_of(6)
    images[4, 2, 1] = value
    write_split(tmp_path, "test", images, 30)
    dataset = opened(tmp_path)
    np.testing.assert_array_equal(dataset.image_batch([5, 3]).numpy(), images[[5, 3]])
    expected = f"{tmp_path / 'test_ims.npy'}: row 4 holds values that are not finite in float32"
    for gather in (lambda: dataset.image_batch([5, 4, 3]), lambda: dataset.batch([0, 22])):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            gather()


def test_values_beyond_float32_are_refused_but_large_sums_are_not(tmp_path):
    images = features_of(4, dtype="float64")
    images[2] = 3e38
    images[3, 0, 0] = 1e39
    write_split(tmp_path, "test", images, 20)
    dataset = opened(tmp_path)
    assert dataset.image_batch([2, 0]).max() == np.float32(3e38)
    with pytest.raises(ValueError, match=r"test_ims\.npy: row 3 holds values that are not finite in float32"):
        dataset.image_batch([3])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a \xff man", r"line 3: not UTF-8 \(byte 2: invalid start byte\)"),
        ("naïve".encode("latin-1"), "line 3: not UTF-8"),
        (b"", "line 3: the caption is empty"),
        (b" \t ", "line 3: the caption is empty"),
        (b"b'a man in a hat'", r"line 3: the caption is the text of a bytes literal \(b'a man in a hat'\)"),
        (b'b"it\'s a man"', r"line 3: the caption is the text of a bytes literal \(b\"it's a man\"\)"),
        (b"B'a hat'", "line 3: the caption is the text of a bytes literal"),
        (b"a" * 100_001, "line 3: expected a caption of at most 100,000 characters, got 100,001$"),
        (b"b'a\\n'", "line 3: the caption is the text of a bytes literal"),
    ],
)
def test_bad_captions_are_refused(tmp_path, line, message):
    write_split(tmp_path, "test", features_of(1), 5)
    (tmp_path / "test_caps.txt").write_bytes(b"\n".join([b"one", b"two", line, b"four", b"five"]))
    refused(tmp_path, "test_caps.txt", message)


def test_an_empty_caption_file_is_refused(tmp_path):
    write_split(tmp_path, "test", features_of(1), 0)
    refused(tmp_path, "test_caps.txt", "expected at least one caption, the file is empty")


def test_the_longest_caption_is_read(tmp_path):
    write_split(tmp_path, "test", features_of(1), 5)
    (tmp_path / "test_caps.txt").write_text(("é" * 100_000 + " \n") * 5, encoding="utf-8")
    assert opened(tmp_path).caption_lengths.tolist() == [3] * 5


@pytest.mark.parametrize("caption", ["b'", "b 'a'", "'a man'", "bob's 'hat'", "a b'c'"])
def test_captions_similar_to_a_bytes_literal_are_read(tmp_path, caption):
    write_split(tmp_path, "test", features_of(1), 5)
    (tmp_path / "test_caps.txt").write_text(f"{caption}\n" * 5, encoding="utf-8")
    assert opened(tmp_path).captions == [caption] * 5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([0, 1, 4, 0, 0], r"line 3: expected an image row from 0 to 3, got 4"),
        ([0, 1, -1, 0, 0], r"line 3: expected an image row from 0 to 3, got -1"),
        ([0, 1, "1.0", 0, 0], r"line 3: expected the row of an image, got '1\.0'"),
        ([0, 1, "", 0, 0], r"line 3: expected the row of an image, got ''"),
        ([0, 1, "x" * 99, 0, 0], r"line 3: expected the row of an image, got 'x{40}'$"),
        ([0, 1, "9" * 5000, 0, 0], r"line 3: expected the row of an image, got '9{40}'"),
        ([0, 1, 2, 3], r"expected one line per caption \(5\), got 4 lines"),
        ([0, 1, 2, 3, 0, 0], r"expected one line per caption \(5\), got 6 lines"),
    ],
)
def test_bad_cap2im_is_refused(tmp_path, lines, message):
    write_split(tmp_path, "test", features_of(4), 5, cap2im=lines)
    refused(tmp_path, "test_cap2im.txt", message)


def test_a_wrong_number_of_ids_is_refused(tmp_path):
    write_split(tmp_path, "test", features_of(4), 20, ids=range(5))
    refused(tmp_path, "test_ids.txt", r"expected one id per image or per caption \(4 or 20 lines\), got 5")


def test_bad_indices_are_refused(tmp_path):
    write_split(tmp_path, "test", features_of(4), 20)
    dataset = opened(tmp_path)
    with pytest.raises(ValueError, match="caption_indices: expected values from 0 to 19, got -1 to 20"):
        dataset.batch([20, -1])
    with pytest.raises(ValueError, match="image_indices: expected values from 0 to 3, got 4 to 4"):
        dataset.image_batch(torch.tensor([4]))
    with pytest.raises(TypeError, match="caption_indices: expected integers, got float64"):
        dataset.caption_batch(np.array([0.0]))
    with pytest.raises(ValueError, match=r"image_indices: expected one dimension, got shape \(1, 1\)"):
        dataset.image_batch([[0]])


def test_an_empty_batch_and_a_batch_of_one_item(tmp_path):
    write_split(tmp_path, "test", features_of(4), 20)
    dataset = opened(tmp_path)
    empty = dataset.batch([])
    assert (empty.features.shape, empty.token_ids.shape, len(empty)) == ((0, 3, 4), (0, 0), 0)
    one = dataset.batch([6])
    np.testing.assert_array_equal(one.features.numpy(), features_of(4)[1:2])
    assert one.token_ids.tolist() == [VOCABULARY.encode(dataset.captions[6])]


def test_arrays_in_memory_give_the_same_batches_as_files(tmp_path):
    images, owners = features_of(3), [2, 0, 0, 1]
    captions = write_split(tmp_path, "test", images, 4, cap2im=owners)
    assert_batches(CaptionDataset(images, [c.strip() for c in captions], owners, VOCABULARY), images, owners)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((features_of(2)[0], ["a"], [0]), r"features: expected floats of shape .*, got float32 \(3, 4\)"),
        ((features_of(2), ["a"], [0, 1]), r"caption_image: expected one image per caption \(1\), got 2"),
        ((features_of(2), ["a"], [2]), "caption_image: expected values from 0 to 1, got 2 to 2"),
    ],
)
def test_arrays_that_do_not_match_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CaptionDataset(*arguments, VOCABULARY)


def test_names_that_do_not_match_the_images_are_refused():
    with pytest.raises(ValueError, match=r"image_ids: expected one name per image \(2\), got 1"):
        CaptionDataset(features_of(2), ["a"], [0], VOCABULARY, image_ids=["x"])
