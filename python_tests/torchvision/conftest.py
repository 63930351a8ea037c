"""Tests that need torchvision, some also timm; pytest collects them only if these can be imported.

Tests without them cover their parts.
"""

import importlib.util

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError, OSError):
    # Built for another torch, it cannot be imported.
    collect_ignore_glob = ["test_*.py"]
else:
    if importlib.util.find_spec("timm") is None:
        collect_ignore_glob = ["test_timm_*.py"]
