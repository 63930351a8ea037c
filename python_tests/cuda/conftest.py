"""Tests that need a GPU; pytest collects them only if torch sees one. Tests without a GPU cover their parts."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
