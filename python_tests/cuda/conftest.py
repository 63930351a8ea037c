"""These tests need a GPU, and are collected where torch sees one. What they are made of is tested without one too."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
