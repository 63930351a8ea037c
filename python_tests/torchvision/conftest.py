"""Tests that need torchvision; pytest collects them only if it can be imported. Tests without it cover their parts."""

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError, OSError):
    # Built for another torch, it cannot be imported.
    collect_ignore_glob = ["test_*.py"]
