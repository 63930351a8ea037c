"""Load the native library, fall back to the packed reference, and report which path runs."""

import functools
import json
import platform
import shutil
import sys

import pytest
import torch

import itm_fast
import itm_fast.functional as F_itm
from itm_fast.ops import library
from python_tests.helpers.processes import ROOT, error_of, run, run_python

AVAILABLE = itm_fast.build_info()["instruction_sets"]["available"]

# Run two operators twice each and print their results and the warnings as JSON.
USE_OPERATORS = """
import json, warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import itm_fast
    import itm_fast.functional as F_itm
    at_import = len(caught)
    scores = torch.tensor([[0.9, 0.3, 0.2], [0.4, 0.5, 0.7], [0.1, 0.6, 0.8]])
    for _ in range(2):
        rows, columns = F_itm.hardest_negatives(scores)
        loss = F_itm.triplet_loss(scores, margin=0.25, mining="hardest")
print(json.dumps({
    "at_import": at_import,
    "warnings": [[w.category.__name__, str(w.message), w.filename] for w in caught],
    "rows": rows[1].tolist(), "columns": columns[1].tolist(), "loss": loss.item(),
    "dispatch": itm_fast.build_info()["dispatch"]["triplet_loss"]["cpu"],
    "libraries": itm_fast.build_info()["libraries"],
}))
"""
# By hand: the row losses max(0, .25 + s_neg - s_pos) are 0, .45, .05; the column losses are 0, .35, .15.
EXPECTED = {"rows": [1, 2, 1], "columns": [1, 2, 1]}
EXPECTED_LOSS = 0.45 + 0.05 + 0.35 + 0.15


@pytest.fixture
def package_folder(tmp_path, monkeypatch):
    """A temporary folder in place of the installed package."""
    monkeypatch.setattr(library, "library_folder", lambda: tmp_path)
    return tmp_path


def test_the_native_library_serves_without_a_warning_even_where_it_was_loaded_before():
    load_first = f"import torch; torch.ops.load_library({str(ROOT / 'itm_fast' / '_C_cpu.so')!r})"
    report = json.loads(run_python(load_first + USE_OPERATORS, ITM_FAST_CPU_ISA=None))
    assert report["warnings"] == []
    assert {name: report[name] for name in EXPECTED} == EXPECTED
    assert report["loss"] == pytest.approx(EXPECTED_LOSS, abs=1e-6)
    assert report["dispatch"] == f"native {AVAILABLE[-1]}"


def test_the_environment_forces_the_fallback_which_warns_once():
    report = json.loads(run_python(USE_OPERATORS, ITM_FAST_NATIVE=0))
    assert report["at_import"] == 0
    message = "itm_fast runs on the packed reference: ITM_FAST_NATIVE=0"
    assert report["warnings"] == [["FallbackWarning", message, "<string>"]]
    assert {name: report[name] for name in EXPECTED} == EXPECTED
    assert report["loss"] == pytest.approx(EXPECTED_LOSS, abs=1e-6)
    assert report["dispatch"] == "packed reference: ITM_FAST_NATIVE=0"


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    shutil.copytree(ROOT / "itm_fast", tmp_path / "itm_fast", ignore=shutil.ignore_patterns("*.so", "emoji_files"))
    broken = tmp_path / "itm_fast" / "_C_cpu.so"
    broken.write_bytes(b"not a library")
    code = "from itm_fast.ops import library; print(library._library_problem)"
    assert run_python(code, cwd=tmp_path).startswith(f"{broken} could not be loaded ({broken}: ")


@pytest.mark.usefixtures("package_folder")
def test_a_missing_library_says_how_to_get_one():
    cause = "the native library was not built (install a C++ compiler, then install itm_fast again)"
    assert library._load_cpu_library() == cause


@pytest.mark.usefixtures("package_folder")
def test_windows_has_no_native_library(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    assert library._load_cpu_library() == "itm_fast has no native library for Windows"


def test_each_cause_warns_by_itself(monkeypatch):
    monkeypatch.setattr(library, "_warned", set())
    with pytest.warns(itm_fast.FallbackWarning, match=r"no native kernel for torch\.int64"):
        assert not library.use_native("triplet_loss", torch.zeros(2, 2, dtype=torch.int64))
    with pytest.warns(itm_fast.FallbackWarning, match="no native kernel for device 'meta'"):
        assert not library.use_native("triplet_loss", torch.zeros(2, 2, device="meta"))
    assert not library.use_native("hardest_negatives", torch.zeros(2, 2, device="meta"))  # It warns only once.
    assert library.use_native("triplet_loss", torch.zeros(2, 2))


def test_the_fallback_is_traced_whole_and_still_warns_once(monkeypatch):
    monkeypatch.setattr(library, "_library_problem", "a test pretends so")
    monkeypatch.setattr(library, "_warned", set())
    compiled = torch.compile(functools.partial(F_itm.triplet_loss, margin=0.25), fullgraph=True, backend="eager")
    scores = torch.tensor([[0.9, 0.3, 0.2], [0.4, 0.5, 0.7], [0.1, 0.6, 0.8]])
    with pytest.warns(itm_fast.FallbackWarning) as caught:
        losses = [compiled(scores).item(), compiled(scores.clone()).item()]
    assert [str(w.message) for w in caught] == ["itm_fast runs on the packed reference: a test pretends so"]
    assert losses == pytest.approx([EXPECTED_LOSS] * 2, abs=1e-6)


def test_a_second_library_is_refused_with_both_names(tmp_path):
    other = shutil.copy(ROOT / "itm_fast" / "_C_cpu.so", tmp_path / "_C_cpu.so")
    error = error_of(f"import torch; torch.ops.load_library({str(other)!r}); import itm_fast")
    assert error == (
        f"ImportError: the operators of itm_fast are already registered by {other}; "
        f"loading {ROOT / 'itm_fast' / '_C_cpu.so'} as well would abort the process. Keep one installation of itm_fast"
    )


def test_the_environment_forces_the_instruction_set():
    code = "import itm_fast; print(itm_fast.build_info()['instruction_sets']['selected'])"
    assert run_python(code, ITM_FAST_CPU_ISA="portable").strip() == "portable"


def test_an_unavailable_instruction_set_is_an_error_that_names_the_available():
    message = f"ITM_FAST_CPU_ISA='sse9' is not available: expected one of {', '.join(AVAILABLE)}"
    use = "import torch, itm_fast.functional as F; F.hardest_negatives(torch.zeros(2, 2))"
    for code in ("import itm_fast; itm_fast.build_info()", use):
        assert error_of(code, ITM_FAST_CPU_ISA="sse9") == f"ValueError: {message}"
    result = run([sys.executable, "-m", "itm_fast", "bench", "--quick"], cwd=ROOT, ITM_FAST_CPU_ISA="sse9")
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, f"itm-fast: error: {message}")


def test_build_info_says_what_was_found():
    info = itm_fast.build_info()
    assert json.loads(json.dumps(info)) == info
    assert info["version"] == itm_fast.__version__
    assert info["torch"]["running"] == torch.__version__
    # The metadata of the wheel may omit the local version ("+cu130").
    assert info["torch"]["built"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["libraries"]["_C_cpu"] == str(ROOT / "itm_fast" / "_C_cpu.so")
    assert info["compiler"].split()[0] in {"GNU", "Clang", "AppleClang"}
    assert info["build_type"] in {"Release", "Debug"}
    sets = info["instruction_sets"]
    assert sets["compiled"][0] == sets["available"][0] == "portable"
    assert set(sets["available"]) <= set(sets["compiled"])
    assert sets["selected"] in sets["available"]
    for paths in info["dispatch"].values():
        assert paths["cpu"] == f"native {sets['selected']}"
        assert paths["mps"] == "packed reference: no native kernel for device 'mps'"


def test_float64_attention_on_cuda_is_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(library, "_cuda_problem", None)
    everywhere = frozenset({"cpu", "cuda"})
    monkeypatch.setattr(library, "_native", {"cross_attention_scores": everywhere, "triplet_loss": everywhere})
    cause = library._fallback_cause("cross_attention_scores", "cuda", torch.float64)
    assert cause == "no native kernel for torch.float64 on device 'cuda'"
    for operator, device, dtype in (
        ("cross_attention_scores", "cuda", torch.float32),
        ("cross_attention_scores", "cuda", torch.float16),
        ("cross_attention_scores", "cpu", torch.float64),
        ("triplet_loss", "cuda", torch.float64),
    ):
        assert library._fallback_cause(operator, device, dtype) is None


def test_a_gpu_that_is_too_old_is_told(monkeypatch):
    monkeypatch.setattr(library, "_cuda_problem", None)
    monkeypatch.setattr(library, "_native", {"triplet_loss": frozenset({"cpu", "cuda"})})
    capabilities = [(7, 5), (8, 0), (9, 0), (10, 3), (12, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    built = {"cuda_architectures": ["80-real", "90a-real", "90a-virtual"]}
    monkeypatch.setattr(library, "_build_information", lambda: built)
    library._gpu_problem.cache_clear()
    causes = [library._fallback_cause("triplet_loss", "cuda", torch.float32, index) for index in range(5)]
    assert causes == ["the CUDA kernels need compute capability 8.0, cuda:0 has 7.5", None, None, None, None]
    library._gpu_problem.cache_clear()
    built["cuda_architectures"] = ["90-real"]
    assert library._gpu_problem(1) == "the CUDA kernels need compute capability 9.0, cuda:1 has 8.0"
    library._gpu_problem.cache_clear()


def test_every_registered_operator_is_listed():
    registered = {name.removeprefix("itm_fast::") for name in library._registered()}
    about_the_library = {"cpu_instruction_set", "available_cpu_instruction_sets"}
    # Operators of the gradients, without a public function.
    gradients = {name for name in registered if name.endswith(("_backward", "_with_gradient"))} | {"scale_gradient"}
    # Operators of prepared contexts; without them scores are computed in the ordinary way.
    prepared = {"cross_attention_grams", "cross_attention_scores_prepared"}
    assert registered - about_the_library - gradients - prepared == set(library.OPERATORS)
