"""Render the bundled emoji data from a font and the Unicode annotations.

    python tools/render_emoji.py [--out itm_fast/data/emoji_files] [--check]

Needs Pillow with the RAQM layout engine (its wheels include it; on Debian also install `libfribidi0`) and two Debian
packages: `fonts-noto-color-emoji` 2.042-0+deb12u1 and `unicode-cldr-core` 41-0.1. `--check` writes nothing and compares
the rendered data with the existing files. The same packages always give the same pictures and texts. The bytes of the
WebP sheets may differ with another version of the encoder, but not their pictures.

Output: `{split}_{n}.webp` (lossless sheets), `{split}_names.tsv` (id, name, keywords), `{split}_caps.txt` (five lines
per picture) and `index.json` (sizes, hashes of the pictures and of the source files).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
from emoji_captions import captions, name_words, ranked
from PIL import Image, ImageDraw, ImageFont, features

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
ANNOTATIONS = Path("/usr/share/unicode/cldr/common")
DEFAULT_OUT = Path(__file__).parent.parent / "itm_fast" / "data" / "emoji_files"

SIZE = 72  # pixels of a picture
STRIKE = 109  # the only size at which the bitmap font can be loaded
GLYPH = (136, 128)  # pixels of its bitmaps
LEVELS = 64  # per colour channel; the difference from 256 is invisible and halves the files
COLUMNS, ROWS = 32, 16  # per sheet
HELD_OUT = {"test": 500, "dev": 300}
MIN_TRAIN_PICTURES = 3  # with each word of a held-out name
SEED = 1


class Emoji(NamedTuple):
    id: str
    name: str
    keywords: tuple[str, ...]
    picture: np.ndarray  # (72, 72, 3) uint8
    captions: tuple[str, ...] = ()


def read_annotations(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return name and keywords of each annotated sequence of code points."""
    names: dict[str, str] = {}
    keywords: dict[str, tuple[str, ...]] = {}
    for part in ("annotations", "annotationsDerived"):
        for entry in ElementTree.parse(folder / part / "en.xml").getroot().iter("annotation"):
            sequence, text = entry.get("cp", ""), entry.text or ""
            if entry.get("type") == "tts":
                names[sequence] = text
            else:
                keywords[sequence] = tuple(word.strip() for word in text.split("|"))
    return {sequence: (name, keywords.get(sequence, ())) for sequence, name in names.items()}


def render(sequence: str, font: ImageFont.FreeTypeFont) -> np.ndarray | None:
    """Render the picture (72, 72, 3) uint8 on white; None if the font has no glyph for the whole sequence."""
    # Some symbols only show their picture if the emoji variation selector follows.
    for text in (sequence, sequence + "\ufe0f"):
        canvas = Image.new("RGBA", (2 * GLYPH[0], GLYPH[1]), (255, 255, 255, 0))
        ImageDraw.Draw(canvas).text((0, 0), text, font=font, embedded_color=True)
        alpha = np.asarray(canvas)[..., 3]
        # Ink to the right of the first glyph: the font draws the parts of the sequence side by side.
        if not alpha.any() or alpha[:, GLYPH[0] :].any():
            continue
        square = Image.new("RGBA", (GLYPH[0], GLYPH[0]), (255, 255, 255, 255))
        square.alpha_composite(canvas.crop((0, 0, *GLYPH)), (0, (GLYPH[0] - GLYPH[1]) // 2))
        small = np.asarray(square.convert("RGB").resize((SIZE, SIZE), Image.Resampling.HAMMING))
        step = 255 / (LEVELS - 1)
        return np.rint(np.rint(small / step) * step).astype(np.uint8)
    return None


def collect(font_path: Path, annotations: Path) -> list[Emoji]:
    """Return all distinct pictures with their captions, sorted by id.

    Among equal pictures, the one with the shortest name (then the lowest id) is kept.
    """
    font = ImageFont.truetype(font_path, STRIKE, layout_engine=ImageFont.Layout.RAQM)
    distinct: dict[bytes, Emoji] = {}
    for sequence, (name, keywords) in read_annotations(annotations).items():
        picture = render(sequence, font)
        if picture is None:
            continue
        emoji = Emoji("_".join(f"{ord(character):04x}" for character in sequence), name, keywords, picture)
        known = distinct.setdefault(picture.tobytes(), emoji)
        if (len(name), emoji.id) < (len(known.name), known.id):
            distinct[picture.tobytes()] = emoji
    emojis = sorted(distinct.values(), key=lambda emoji: emoji.id)
    counts = Counter(caption for emoji in emojis for caption in captions(*emoji[:3]))
    shared = {caption for caption, count in counts.items() if count > 1}
    return [emoji._replace(captions=tuple(captions(*emoji[:3], shared))) for emoji in emojis]


def split(emojis: list[Emoji]) -> dict[str, list[Emoji]]:
    """Hold out pictures whose names consist of words that at least three training pictures have in their captions.

    A name with a word that training never shows ("flag of qatar") could only be found by chance. Held-out pictures are
    new combinations of known words. Pictures are tried in a hashed order, test first; the rest is for training.
    """
    by_id = {emoji.id: emoji for emoji in emojis}
    shown = {emoji.id: frozenset(" ".join(emoji.captions).split()) for emoji in emojis}
    training = Counter(word for words in shown.values() for word in words)
    order = ranked(by_id, "split", SEED)
    targets = [name for name, count in HELD_OUT.items() for _ in range(count)]
    chosen: dict[str, str] = {}
    needed: set[str] = set()
    for picture_id in order:
        if len(chosen) == len(targets):
            break
        name = name_words(by_id[picture_id].name)
        # Removing the picture must leave enough for its own words and for those of the pictures removed before.
        if all(training[word] > MIN_TRAIN_PICTURES for word in shown[picture_id] & (needed | name)):
            chosen[picture_id] = targets[len(chosen)]
            needed |= name
            training.subtract(shown[picture_id])
    if len(chosen) < len(targets):
        raise SystemExit(f"only {len(chosen)} of {len(targets)} pictures can be held out")
    # Use another order than that of the selection, in which the refused pictures would come first in training.
    shuffled = ranked(by_id, "order", SEED)
    return {part: [by_id[i] for i in shuffled if chosen.get(i, "train") == part] for part in ("train", "dev", "test")}


def sheets(emojis: list[Emoji]) -> list[Image.Image]:
    """Return sheets of 32 x 16 pictures, row by row, in name order: similar neighbours compress better."""
    pictures = [emoji.picture for emoji in sorted(emojis, key=lambda emoji: emoji.name)]
    result = []
    for start in range(0, len(pictures), COLUMNS * ROWS):
        group = pictures[start : start + COLUMNS * ROWS]
        sheet = np.full((-(-len(group) // COLUMNS), COLUMNS, SIZE, SIZE, 3), 255, dtype=np.uint8)
        sheet.reshape(-1, SIZE, SIZE, 3)[: len(group)] = group
        rows = sheet.transpose(0, 2, 1, 3, 4).reshape(-1, COLUMNS * SIZE, 3)
        result.append(Image.fromarray(rows))
    return result


def text_files(parts: dict[str, list[Emoji]], sources: dict[str, Path]) -> dict[str, str]:
    """Return everything except the sheets, by file name."""
    files = {}
    splits = {}
    for part, emojis in parts.items():
        files[f"{part}_names.tsv"] = "".join(f"{e.id}\t{e.name}\t{' | '.join(e.keywords)}\n" for e in emojis)
        files[f"{part}_caps.txt"] = "".join(line + "\n" for e in emojis for line in e.captions)
        pixels = hashlib.sha256(b"".join(emoji.picture.tobytes() for emoji in emojis)).hexdigest()
        splits[part] = {"pictures": len(emojis), "sha256_of_pixels": pixels}
    index = {
        "size": SIZE,
        "columns": COLUMNS,
        "rows": ROWS,
        "splits": splits,
        "sources": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sources.items()},
    }
    files["index.json"] = json.dumps(index, indent=1) + "\n"
    return files


def write(path: Path, content: bytes) -> None:
    """Write through a temporary file, so that an interrupted run leaves no partial file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
        temporary.write(content)
    Path(temporary.name).chmod(0o644)
    Path(temporary.name).replace(path)


def differing(folder: Path, files: dict[str, str]) -> list[str]:
    """Return the names of `files` that differ in `folder`, or are missing there (marked)."""
    names = []
    for name, text in files.items():
        if not (folder / name).is_file():
            names.append(f"{name} (missing)")
        elif (folder / name).read_bytes() != text.encode("utf-8"):
            names.append(name)
    return names


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render the bundled emoji data.")
    parser.add_argument("--font", type=Path, default=FONT)
    parser.add_argument("--annotations", type=Path, default=ANNOTATIONS, help="folder of annotations/en.xml")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    arguments = parser.parse_args()
    if not features.check("raqm"):
        raise SystemExit("Pillow has no RAQM layout engine: install libfribidi0 or a Pillow with libraqm")
    derived = arguments.annotations / "annotationsDerived" / "en.xml"
    annotations = arguments.annotations / "annotations" / "en.xml"
    sources = {"NotoColorEmoji.ttf": arguments.font, "annotations/en.xml": annotations}
    sources["annotationsDerived/en.xml"] = derived
    for path in sources.values():
        if not path.is_file():
            raise SystemExit(f"{path}: no such file (Debian packages fonts-noto-color-emoji, unicode-cldr-core)")

    parts = split(collect(arguments.font, arguments.annotations))
    files = text_files(parts, sources)
    if arguments.check:
        changed = differing(arguments.out, files)
        if changed:
            raise SystemExit(f"{arguments.out}: not as rendered: {', '.join(changed)}")
        print(f"{arguments.out}: as rendered", file=sys.stderr)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write(arguments.out / name, text.encode("utf-8"))
    for part, emojis in parts.items():
        for number, sheet in enumerate(sheets(emojis)):
            buffer = io.BytesIO()
            sheet.save(buffer, "WEBP", lossless=True, quality=100, method=6)
            write(arguments.out / f"{part}_{number}.webp", buffer.getvalue())
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    counts = ", ".join(f"{part} {len(emojis)}" for part, emojis in parts.items())
    print(f"{arguments.out}: {counts} pictures, {size / 1e6:.2f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
