"""Templates and pictures of HTML pages.

Inside: `render`, `png_uri`.
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

__all__ = ["png_uri", "render"]

# Characters that HTML and XML forbid but captions and labels may contain. Surrogates of paths are escaped on writing.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")


def render(template: str, **values: Any) -> str:
    """Fill a template. Values are escaped, forbidden characters are replaced, and a missing name is an error."""
    environment = Environment(
        loader=PackageLoader("itm_fast.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return _FORBIDDEN.sub("\ufffd", environment.get_template(template).render(**values))


def png_uri(pixels: np.ndarray) -> str:
    """Encode pixels uint8 (height, width, 3) as a data URI, so that the page contains the picture."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
