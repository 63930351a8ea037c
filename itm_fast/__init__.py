"""Image-text matching in PyTorch with native cross-attention kernels."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from itm_fast.version import __version__

if TYPE_CHECKING:
    from itm_fast import data, evaluation, functional, losses, models, nn, reference, search, training
    from itm_fast.fragments import Fragments
    from itm_fast.ops.library import FallbackWarning, build_info
    from itm_fast.reference.validation import debug_checks
    from itm_fast.search import Index

__all__ = [
    "FallbackWarning",
    "Fragments",
    "Index",
    "__version__",
    "build_info",
    "data",
    "debug_checks",
    "evaluation",
    "functional",
    "losses",
    "models",
    "nn",
    "reference",
    "search",
    "training",
]

_SOURCES = {
    "FallbackWarning": "itm_fast.ops.library",
    "Fragments": "itm_fast.fragments",
    "Index": "itm_fast.search",
    "build_info": "itm_fast.ops.library",
    "debug_checks": "itm_fast.reference.validation",
}


def __getattr__(name: str) -> Any:
    """Import a name or a submodule on first use, so that `itm-fast --version` need not import torch."""
    if name in _SOURCES:
        value = getattr(import_module(_SOURCES[name]), name)
    elif name in __all__:
        value = import_module(f"itm_fast.{name}")
    else:
        raise AttributeError(f"module 'itm_fast' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Where torch is loaded, `import itm_fast` registers the operators, as users of torch.ops expect.
if "torch" in sys.modules:
    import_module("itm_fast.ops.library")
