"""What `itm-fast bench` measures: native operators against the published loop and plain PyTorch, in one run."""
