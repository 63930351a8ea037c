"""The table of what the CUDA kernels take: how the compiler is read, what fails, and that no kernel is missing."""

import re

import cuda_resources
import pytest
from cuda_resources import Usage
from helpers.processes import ROOT

REPORT = """\
ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_' for 'sm_80'
ptxas info    : Function properties for _ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 36 registers, used 1 barriers, 256 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_' for 'sm_90'
ptxas info    : Function properties for _ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_
    40 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 416 bytes cmem[0]
"""
USAGES = [Usage("work<float>", 80, 36, 256, 0, 0), Usage("work<float>", 90, 255, 0, 40, 56)]


def test_the_words_of_the_compiler_are_read() -> None:
    assert cuda_resources.parse(REPORT) == USAGES
    with pytest.raises(ValueError, match="not understood: ptxas info : Compiling entry function"):
        cuda_resources.parse("ptxas info : Compiling entry function 'work' for 'sm_80'\n")


def test_the_table_has_a_line_for_each_kernel() -> None:
    page = cuda_resources.page([*USAGES, Usage("idle", 80, 8, 0, 0, 0), Usage("idle", 90, 9, 0, 0, 0)])
    assert page.splitlines()[-2:] == [
        "| `idle` | 8/9 | 0 | 0 | 0 |",
        "| `work<float>` | 36/255 | 256/0 | 0/40 | 0/56 |",
    ]


def test_a_spill_is_a_problem_unless_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_resources.spilling(USAGES) == ["work<float> spills 56 bytes on sm_90"]
    monkeypatch.setattr(cuda_resources, "MAY_SPILL", {"work<": "a test says so"})
    assert cuda_resources.spilling(USAGES) == []


def test_the_page_names_every_kernel_and_no_spill() -> None:
    sources = "".join(source.read_text() for source in (ROOT / "csrc/cuda").glob("*.cu"))
    kernels = set(re.findall(r"__global__ [^;{]*?(\w+)_kernel\(", sources))
    rows = re.findall(r"^\| `(\w+)<.*>` \| [\d/]+ \| \d+ \| (\d+) \| (\d+) \|$", cuda_resources.PAGE.read_text(), re.M)
    assert len(kernels) == 5
    assert {name for name, _, _ in rows} == kernels
    assert {(stack, spilled) for _, stack, spilled in rows} == {("0", "0")}
