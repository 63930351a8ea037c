"""`Index`: encode images and captions once, search them with a model, and change them safely.

Inside: `Index`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from itm_fast.data import CaptionDataset
from itm_fast.evaluation import Explanation, explain_encoded
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.search import changing, queries, searching
from itm_fast.search.manifest import SIDES
from itm_fast.search.members import Members, Models
from itm_fast.search.opened import OpenIndex
from itm_fast.search.pictures import Picture
from itm_fast.search.results import Results
from itm_fast.search.sources import Source

__all__ = ["Index"]


class Index(OpenIndex):
    """Images and captions that a model encoded once, to be searched by it. `build` and `open` make one.

    A search finds candidates and ranks them by the model's own `score`. Inner products of pooled vectors make a
    shortlist, and MaxSim of the stored rows chooses the candidates from it.

    Any number of threads and processes may read an index, also while another one changes it: they see one state until
    `reload`. One process at a time may change it.

    Attributes:
        path: the folder.
        snapshot: the open state; it is replaced, never changed.
    """

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], model: Models | Members | None = None, *, device: torch.device | str = "cpu"
    ) -> Index:
        """Open an index. Its files are mapped into memory, and read when a search needs them.

        Args:
            path: the folder of the index.
            model: the model or models of the index, or their run directories; None: the run directories that the index
                names, which are read at the first search.
            device: where models that are loaded run.

        Raises:
            ValueError: this is no index, it is damaged or of a newer version, or `model` is not its model.
        """
        index = cls(Path(path), model, device)
        if model is not None:
            index.members  # noqa: B018 - checks the model.
        return index

    @classmethod
    def build(
        cls,
        model: Models | Members,
        source: Source,
        path: str | os.PathLike[str],
        *,
        ids: Sequence[str] | None = None,
        id_prefix: str = "",
        captions: Sequence[str] | None = None,
        preprocessing: str | None = None,
        dtype: str = "bf16",
        pooling: str | None = None,
        training: CaptionDataset | None = None,
        candidates: int = searching.CANDIDATES,
        thumbnails: bool = True,
        overwrite: bool = False,
        skip_bad: bool = False,
        batch_size: int = 128,
        progress: bool = False,
        device: torch.device | str = "cpu",
    ) -> Index:
        """Encode items and write an index.

        Args:
            model: a model with its tokenizer, a run directory, or several of either: an ensemble by mean score.
            source: a data set, whose images and captions become items; features (n, k, f), a tensor, an array or
                Fragments; the path of a folder of pictures; or a list of pictures: paths, contents of files, uint8
                arrays (height, width, 3) or pictures of Pillow.
            path: the folder to write. A killed build leaves no index, and the next one removes its files.
            ids: a name for each image; default: the names in the data set, paths below the folder, or numbers.
            id_prefix: goes before each name.
            captions: a text for each image of features or pictures, which results show.
            preprocessing: how a picture becomes features: "emoji"; "SIDExGRID" for the patches that stores of
                pictures hold, such as "224x14", and "224x14 stretched" for those of `data import --stretch`; or what
                `encoder_kind` returns for the vision model of `data import --encoder`. Default: as in the data set.
                Without it, pictures cannot be searched.
            dtype: "bf16", or "int8" with a scale per row, which takes half the space.
            pooling: how candidates are found: by the "mean" of the rows, or by vectors "learned" from the model's own
                scores on `training`. Default: learned if `training` or `source` is a data set.
            training: a data set with captions for the learned pooling, best that of the training; default: `source`.
            candidates: number of items that the model scores per query.
            thumbnails: keep a small copy of each picture.
            overwrite: replace the index in `path` in one step.
            skip_bad: leave out pictures that cannot be decoded, with a warning for each; False: raise an error.
            batch_size: items that are encoded at a time.
            progress: show a progress bar on a terminal.
            device: where models that are loaded run.

        Returns:
            The open index.

        Raises:
            ValueError: an argument is wrong, the folder holds something else, or another process changes the index.
            OSError: the disk is full. An earlier index in `path` is kept.
        """
        members = model if isinstance(model, Members) else Members(model, device)
        changing.build(
            members, source, Path(path), ids=ids, id_prefix=id_prefix, captions=captions, preprocessing=preprocessing,
            dtype=dtype, pooling=pooling, training=training, candidates=candidates, thumbnails=thumbnails,
            overwrite=overwrite, skip_bad=skip_bad, batch_size=batch_size, progress=progress,
        )  # fmt: skip
        return cls(Path(path), members, device)

    def search(
        self,
        texts: str | Sequence[str] | None = None,
        k: int | None = None,
        *,
        pictures: Picture | Sequence[Picture] | None = None,
        features: Tensor | np.ndarray | Fragments | None = None,
        items: str | Sequence[str] | None = None,
        of: str | None = None,
        candidates: int | None = None,
        exact: bool = False,
        encoder: str | os.PathLike[str] | None = None,
    ) -> list[Results]:
        """Find the items with the best scores for each query. Pass one kind of query.

        Args:
            texts: a text, or several.
            k: number of results; default: 10, or all items if there are fewer.
            pictures: a path, the content of a file, a uint8 array (height, width, 3) or a picture of Pillow; or
                several.
            features: (n, k, f) or Fragments, as the model takes them.
            items: the id of an image of the index, or several. A like search does not find the item itself.
            of: "images" or "captions". Default: images for texts; captions for all others, or images if the index has
                no captions. Images for a picture are like images: see `Members.scores`.
            candidates: number of items that the model scores; default: that of the index.
            exact: score all items.
            encoder: folder of the vision model that turns pictures into features, if it was moved since the build.

        Returns:
            The results of each query. Equal scores are in the order of addition.

        Raises:
            TypeError: a query is no text, an id is no text, or a picture is none of these.
            ValueError: a query is empty, unreadable or too long, none of its words is known, or `k` is not from 1 to
                the number of items.
        """
        snapshot = self.snapshot
        encoded = queries.of_any(self.members, snapshot, texts, pictures, features, items, encoder)
        if of is None:
            of = "captions" if encoded.side == "images" and snapshot.sides["captions"].count else "images"
        if of not in SIDES:
            raise ValueError(f"of: expected images or captions, got {shown(of)}")
        return searching.search(snapshot, self.members, encoded, of, k, candidates, exact=exact)

    def explain(self, text: str, image: str, member: int = 0) -> Explanation:
        """Return what a model computes for a text and an image of the index: attention, aggregation and score.

        Args:
            text: the query.
            image: the id of the image.
            member: number of the model in an ensemble.

        Raises:
            ValueError: as `search`; or the model has no attention between words and regions.
        """
        if member not in range(len(self.members.models)):
            raise ValueError(f"member: the index has {len(self.members.models)} models, counted from 0; got {member}")
        own = self.snapshot.sides["images"]
        encoded = own.encodings(torch.tensor([own.find(image)]))
        query = queries.of_texts(self.members, text)
        model = self.members.models[member]
        device = next(model.parameters()).device
        regions, words = encoded[member].to(device), query.encodings[member].to(device)
        if model.tokenizer is None:
            raise ValueError("tokenizer: the model has none")
        return explain_encoded(model, regions, words, model.tokenizer.pieces(query.names[0]))

    # Changing

    def add(
        self,
        source: Source,
        *,
        ids: Sequence[str] | None = None,
        id_prefix: str = "",
        captions: Sequence[str] | None = None,
        encoder: str | os.PathLike[str] | None = None,
        thumbnails: bool = True,
        new_only: bool = False,
        skip_bad: bool = False,
        batch_size: int = 128,
        progress: bool = False,
    ) -> tuple[int, int]:
        """Encode more items and add them, all or none. Other arguments as in `build` and `search`.

        Args:
            new_only: with a folder of pictures as `source`, skip those that the index has already, by their path below
                the folder. A file with other content is skipped, too.

        Returns:
            The numbers of items that were added, and of pictures that the index has already.

        Raises:
            ValueError: as `build`; an id is taken, or the features were made by another encoder than the index's; or
                `new_only` was given with another source, or with `ids` or `captions`.
        """
        numbers = changing.add(
            self.path, self.members, source, ids=ids, id_prefix=id_prefix, captions=captions, encoder=encoder,
            thumbnails=thumbnails, new_only=new_only, skip_bad=skip_bad, batch_size=batch_size, progress=progress,
        )  # fmt: skip
        self.reload()
        return numbers

    def delete(self, ids: str | Sequence[str]) -> int:
        """Delete images with their captions, or captions, by id, all or none; return the number of deleted items.

        Raises:
            ValueError: the index holds no such item, or another process changes it.
        """
        count = changing.delete(self.path, [ids] if isinstance(ids, str) else ids)
        self.reload()
        return count

    def compact(self) -> None:
        """Remove deleted items from the disk, and join small files. Readers go on."""
        changing.compact(self.path)
        self.reload()

    def relocate(self, checkpoints: Models | None = None, *, encoder: str | os.PathLike[str] | None = None) -> None:
        """Record where the models and the encoder of pictures are, after they were moved.

        Args:
            checkpoints: the run directories of the models, in the order of the build.
            encoder: the folder of the vision model that turns pictures into features.

        Raises:
            ValueError: neither was given, a folder cannot be read, or it holds another model.
        """
        changing.relocate(self.path, checkpoints, encoder)
        self.reload()

    def set_candidates(self, candidates: int) -> None:
        """Change the number of items that the model scores per query unless a search says otherwise."""
        changing.update(self.path, lambda manifest: attrs.evolve(manifest, candidates=candidates))
        self.reload()
