"""Image-text matching in PyTorch with native cross-attention kernels."""

from itm_fast.fragments import Fragments
from itm_fast.ops.library import FallbackWarning, build_info
from itm_fast.reference.validation import debug_checks
from itm_fast.version import __version__

__all__ = ["FallbackWarning", "Fragments", "__version__", "build_info", "debug_checks"]
