"""Check uploaded pictures before they are decoded.

Inside: `check_picture`.
"""

from __future__ import annotations

import io
import warnings

from PIL import Image, UnidentifiedImageError

__all__ = ["check_picture"]

# Fewer decoders than the command line uses: those of formats that browsers show.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP")


def check_picture(content: bytes, pixels: int) -> None:
    """Raise ValueError if a file is of another format or has more than `pixels` pixels. Only its header is read."""
    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            formats = [name for name in _FORMATS if name in Image.OPEN]
            with Image.open(io.BytesIO(content), formats=formats) as image:
                size = image.size
        except UnidentifiedImageError:
            raise ValueError(f"picture: expected a file of {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}") from None
        except Image.DecompressionBombError:
            raise _too_large(pixels) from None
        except Exception:  # Each decoder has exceptions of its own.
            raise ValueError("picture: the file is damaged") from None
    if size[0] * size[1] > pixels:
        raise _too_large(pixels)


def _too_large(pixels: int) -> ValueError:
    return ValueError(f"picture: expected at most {pixels:,} pixels; scale it down first")
