"""Write scenes of emoji: two to four of them on a grid of 6 x 6 cells, with sentences about what is where.

    python tools/emoji_scenes.py --out runs/emoji-scenes [--pictures] [--seed 1]

The bundled emoji show one object each. These scenes ask what they cannot: several objects, and relations in words. Each
scene has a twin of the same objects in which two have changed places; its sentences are near misses. Some pairs of
objects occur in one held-out split only, so that a model cannot have learned them as a whole. The scenes are synthetic:
pictures of a font, sentences of a grammar.

Output, in the published layout: `{split}_ims.npy` (36 patches of a 72 x 72 picture), `{split}_caps.txt` (five lines per
scene), `{split}_ids.txt`, `vocab.json`, and `{split}_scenes.json`, the objects of each scene with row and column of
their top left cell. `--pictures` also writes `pictures/*.png` and `captions.csv` for `itm-fast data import`.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from itm_fast.data import Vocabulary, emoji
from itm_fast.files import atomic

SCENES = {"train": 3000, "dev": 300, "test": 500}
HELD_OUT = {"dev": 0.1, "test": 0.15}  # shares of all pairs of objects
CELLS, SPAN = emoji.GRID, 2  # cells of a side of the picture, and of an object

# Names in Unicode CLDR, and the words for them in sentences.
OBJECTS = {
    "red apple": "apple", "banana": "banana", "strawberry": "strawberry", "watermelon": "watermelon",
    "pineapple": "pineapple", "lemon": "lemon", "carrot": "carrot", "eggplant": "eggplant", "mushroom": "mushroom",
    "pizza": "pizza", "hamburger": "hamburger", "doughnut": "doughnut", "cookie": "cookie", "bread": "loaf of bread",
    "dog face": "dog", "cat face": "cat", "pig face": "pig", "frog": "frog", "panda": "panda", "fox": "fox",
    "lion": "lion", "chicken": "chicken", "penguin": "penguin", "owl": "owl", "turtle": "turtle",
    "octopus": "octopus", "whale": "whale", "butterfly": "butterfly", "snail": "snail", "lady beetle": "lady beetle",
    "cactus": "cactus", "sunflower": "sunflower", "rose": "rose", "deciduous tree": "tree", "tulip": "tulip",
    "house": "house", "automobile": "car", "bicycle": "bicycle", "bus": "bus", "airplane": "airplane",
    "rocket": "rocket", "sailboat": "sailboat", "fire engine": "fire engine", "tractor": "tractor", "sun": "sun",
    "star": "star", "cloud": "cloud", "rainbow": "rainbow", "fire": "fire", "snowman": "snowman",
    "umbrella": "umbrella", "soccer ball": "soccer ball", "basketball": "basketball", "trophy": "trophy",
    "guitar": "guitar", "drum": "drum", "bell": "bell", "balloon": "balloon", "key": "key", "hammer": "hammer",
    "scissors": "pair of scissors", "camera": "camera", "light bulb": "light bulb", "crown": "crown",
    "top hat": "top hat", "red heart": "heart", "ghost": "ghost", "robot": "robot", "teddy bear": "teddy bear",
    "anchor": "anchor",
}  # fmt: skip


class Thing(NamedTuple):
    """An object of a scene, and the row and column of its top left cell."""

    name: str
    row: int
    column: int


Scene = tuple[Thing, ...]


def held_out_pairs(random: np.random.Generator) -> dict[str, set[frozenset[str]]]:
    """Draw the pairs of objects that occur in dev or in test only."""
    pairs = [frozenset(pair) for pair in itertools.combinations(OBJECTS, 2)]
    order = random.permutation(len(pairs))
    found, first = {}, 0
    for split, share in HELD_OUT.items():
        last = first + round(share * len(pairs))
        found[split] = {pairs[index] for index in order[first:last]}
        first = last
    return found


def scenes_of(split: str, held_out: dict[str, set[frozenset[str]]], random: np.random.Generator) -> list[Scene]:
    """Draw scenes, each followed by its twin with the first two objects exchanged.

    In dev and test, the first two objects are a held-out pair of the split; no other pair is held out, in any split.
    """
    names, reserved = list(OBJECTS), set().union(*held_out.values())
    own = sorted(map(sorted, held_out.get(split, ())))
    scenes: list[Scene] = []
    seen: set[Scene] = set()
    while len(scenes) < SCENES[split]:
        count = int(random.integers(2, 5))
        chosen = list(own[random.integers(len(own))]) if own else []
        chosen += [names[index] for index in random.permutation(len(names)) if names[index] not in chosen]
        chosen = chosen[:count]
        others = [frozenset(pair) for pair in itertools.combinations(chosen, 2)][1 if own else 0 :]
        if any(pair in reserved for pair in others):
            continue
        places = _places(count, random)
        if places is None:
            continue
        scene = tuple(Thing(name, *place) for name, place in zip(chosen, places, strict=True))
        first, second, *rest = scene
        twin = (Thing(first.name, *second[1:]), Thing(second.name, *first[1:]), *rest)
        keys = {tuple(sorted(one)) for one in (scene, twin)}
        if keys & seen:
            continue
        seen |= keys
        scenes += [scene, twin]
    return scenes


def _places(count: int, random: np.random.Generator) -> list[tuple[int, int]] | None:
    """Draw places that do not overlap; the first two differ clearly in one direction at least. None if it failed."""
    places: list[tuple[int, int]] = []
    for _ in range(20 * count):
        row, column = (int(value) for value in random.integers(0, CELLS - SPAN + 1, 2))
        if all(max(abs(row - r), abs(column - c)) >= SPAN for r, c in places):
            places.append((row, column))
        if len(places) == count:
            return places
    return None


def relation(first: Thing, second: Thing) -> str:
    """Say where the first object is, seen from the second: along the direction in which they are farther apart."""
    down, right = first.row - second.row, first.column - second.column
    if abs(right) > abs(down):
        return "to the right of" if right > 0 else "to the left of"
    if abs(down) > abs(right):
        return "below" if down > 0 else "above"
    return f"{'below' if down > 0 else 'above'} and to the {'right' if right > 0 else 'left'} of"


def place(thing: Thing) -> str:
    """Say in which part of the picture an object is."""
    last = CELLS - SPAN
    vertical = "top" if thing.row < last / 2 else "bottom" if thing.row > last / 2 else ""
    horizontal = "left" if thing.column < last / 2 else "right" if thing.column > last / 2 else ""
    where = " ".join(filter(None, (vertical, horizontal)))
    return f"{'at' if vertical else 'on'} the {where}" if where else "in the middle"


def captions_of(scene: Scene, random: np.random.Generator) -> list[str]:
    """Return five sentences; the first two are about the pair that the twin exchanges."""
    first, second, *rest = scene

    def noun(thing: Thing) -> str:
        word = OBJECTS[thing.name]
        return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"

    def related(one: Thing, other: Thing) -> str:
        return f"{noun(one)} is {relation(one, other)} {noun(other)}"

    pairs = list(itertools.permutations(scene, 2))
    third, fourth = (pairs[index] for index in random.choice(len(pairs), 2, replace=False))
    listed = ", ".join(noun(thing) for thing in (first, second, *rest)[:-1]) + f" and {noun(scene[-1])}"
    chosen = scene[random.integers(2)]
    other = second if chosen is first else first
    return [
        related(first, second),
        f"{related(second, first)}, and {noun(chosen)} is {place(chosen)}",
        f"{noun(first)} {place(first)} and {noun(second)} {place(second)}",
        f"there are {listed}; {related(chosen, other)}",
        f"{related(*third)}, and {related(*fourth)}",
    ]


def pictures_of(scenes: list[Scene]) -> np.ndarray:
    """Draw scenes on white, (n, 72, 72, 3) uint8; an object covers 2 x 2 cells."""
    side = SPAN * emoji.PATCH
    small = {}
    for split in emoji.SPLITS:
        pictures = emoji.pictures(split)
        for number, name in enumerate(emoji.names(split)):
            if name in OBJECTS:
                small[name] = np.asarray(
                    Image.fromarray(pictures[number]).resize((side, side), Image.Resampling.LANCZOS)
                )
    drawn = np.full((len(scenes), emoji.SIZE, emoji.SIZE, 3), 255, dtype=np.uint8)
    for picture, scene in zip(drawn, scenes, strict=True):
        for thing in scene:
            top, left = thing.row * emoji.PATCH, thing.column * emoji.PATCH
            picture[top : top + side, left : left + side] = small[thing.name]
    return drawn


def all_scenes(seed: int) -> Iterator[tuple[str, list[Scene], list[str]]]:
    """Yield split, scenes and captions, always the same for a seed."""
    random = np.random.default_rng(seed)
    held_out = held_out_pairs(random)
    for split in emoji.SPLITS:
        scenes = scenes_of(split, held_out, random)
        yield split, scenes, [caption for scene in scenes for caption in captions_of(scene, random)]


def write(out: Path, seed: int, with_pictures: bool) -> None:
    """Write the files into a new or existing folder, each atomically."""
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(("image", "caption", "split"))
    for split, scenes, captions in all_scenes(seed):
        pictures = pictures_of(scenes)
        ids = [f"{split}-{number:04d}" for number in range(len(scenes))]
        with atomic.atomic_file(out / f"{split}_ims.npy") as file:
            np.save(file, emoji.patches(pictures))
        atomic.write_text(out / f"{split}_caps.txt", "".join(f"{caption}\n" for caption in captions))
        atomic.write_text(out / f"{split}_ids.txt", "".join(f"{one}\n" for one in ids))
        things = [[list(thing) for thing in scene] for scene in scenes]
        atomic.write_text(out / f"{split}_scenes.json", json.dumps(things) + "\n")
        if split == "train":
            atomic.write_text(out / "vocab.json", Vocabulary.build(captions).to_json())
        if with_pictures:
            atomic.make_folder(out / "pictures")
            for number, (one, picture) in enumerate(zip(ids, pictures, strict=True)):
                Image.fromarray(picture).save(out / "pictures" / f"{one}.png")
                rows.writerows((f"{one}.png", text, split) for text in captions[5 * number : 5 * number + 5])
    if with_pictures:
        atomic.write_text(out / "captions.csv", table.getvalue())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write scenes of emoji with sentences about what is where.")
    parser.add_argument("--out", type=Path, default=Path("runs/emoji-scenes"), help="default: %(default)s")
    parser.add_argument("--pictures", action="store_true", help="also write PNG files and captions.csv")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        write(options.out, options.seed, options.pictures)
    except (ValueError, OSError) as error:
        print(f"emoji_scenes: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
