"""What every page is made with. Inside: `render`, `png_uri`."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

__all__ = ["png_uri", "render"]


def render(template: str, **values: Any) -> str:
    """The page of a template. Texts are escaped by the template engine; a name that is missing is an error."""
    environment = Environment(
        loader=PackageLoader("itm_fast.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def png_uri(pixels: np.ndarray) -> str:
    """Pixels uint8 (height, width, 3) as the address of a picture that lies in the page itself."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
