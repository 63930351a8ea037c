"""Use itm_fast within other packages, and their models within itm_fast. Each module is imported by its own name.

`itm_fast.adapters.sentence_transformers`, `itm_fast.adapters.open_clip`, `itm_fast.adapters.onnx`.
"""
