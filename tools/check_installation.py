"""Check an installed itm_fast outside its source tree: native path, numbers, bundled files. Fail on a wrong one.

With an argument, the package must be the one in that source tree: an editable install.
"""

import sys
from importlib.resources import files
from pathlib import Path

import torch

import itm_fast
import itm_fast.functional as F_itm
from itm_fast.data import emoji
from itm_fast.reference import cross_attention as reference
from itm_fast.training import recipes

package = Path(itm_fast.__file__).parent
if len(sys.argv) > 1:
    assert package.samefile(Path(sys.argv[1], "itm_fast")), f"{package} is not the package in {sys.argv[1]}"
else:
    assert "site-packages" in package.parts, f"{package} is not an installed package"

info = itm_fast.build_info()
native = f"native {info['instruction_sets']['selected']}"
for operator, paths in info["dispatch"].items():
    assert paths["cpu"] == native, f"{operator} on cpu: {paths['cpu']}, expected {native}"

assert bool(info["libraries"]["_C_cuda"]) == bool(info["cuda_architectures"]), f"_C_cuda does not fit: {info}"

generator = torch.Generator().manual_seed(0)
words = torch.nn.functional.normalize(torch.randn(14, 32, generator=generator), dim=1)
regions = torch.nn.functional.normalize(torch.randn(18, 32, generator=generator), dim=1)
queries = itm_fast.Fragments(words, torch.tensor([0, 3, 8, 14]))
contexts = itm_fast.Fragments(regions, torch.tensor([0, 9, 18]))
scores = F_itm.cross_attention_scores(queries, contexts)
exact = reference.cross_attention_scores(
    itm_fast.Fragments(words.double(), queries.offsets), itm_fast.Fragments(regions.double(), contexts.offsets)
)
error = (scores - exact).abs().max().item()
assert error < 1e-6, f"cross_attention_scores is off by {error}"

pictures = emoji.pictures("test")
assert pictures.shape == (500, 72, 72, 3), pictures.shape
assert pictures.std() > 10, "the bundled pictures are blank"

template = files("itm_fast.report").joinpath("templates", "report.html.j2")
assert "report.title" in template.read_text(encoding="utf-8"), "the template of the report is missing"

page = files("itm_fast").joinpath("serve", "page", "search.js")
assert "showHits" in page.read_text(encoding="utf-8"), "the page of itm-fast serve is missing"

recipe = recipes.load("scan-t2i-f30k")
assert recipe.settings["lr"] == 2e-4, recipe

print(f"itm_fast {info['version']} from {package}: {native}, scores off by {error:.1e}")
