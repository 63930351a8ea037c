"""`make test-cuda-load`: the check of the CUDA library, and the script on a machine without nvcc."""

from __future__ import annotations

import shutil

import check_cuda_library
import pytest
import torch

import itm_fast
from itm_fast.ops import library
from python_tests.helpers.processes import ROOT, run

LIBRARIES = {"_C_cpu": "/a/_C_cpu.so", "_C_cuda": "/a/_C_cuda.so", "_host": None}
KERNELS = {"triplet_loss", "triplet_loss_backward", "retrieval_ranks"}


@pytest.fixture
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a torch with CUDA and both libraries loaded: three operators for CUDA, a fourth for the CPU."""
    info = {"libraries": LIBRARIES, "dispatch": {"triplet_loss": {"cuda": "packed reference: as tested"}}}
    registered = {"cuda": frozenset(KERNELS), "cpu": frozenset(KERNELS | {"regulated_scores"})}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/a/_C_cpu.so", "/a/_C_cuda.so"})
    monkeypatch.setattr(itm_fast, "build_info", lambda: info)
    monkeypatch.setattr(library, "operators_of", registered.__getitem__)
    monkeypatch.setattr(check_cuda_library, "implemented", lambda folder: KERNELS)


@pytest.mark.usefixtures("_loaded")
def test_the_check_names_what_is_there_and_what_is_not_built() -> None:
    assert check_cuda_library.check() == (
        f"torch {torch.__version__}: _C_cpu and _C_cuda are loaded, 3 operators are registered for CUDA "
        "(retrieval_ranks, triplet_loss, triplet_loss_backward); not built: regulated_scores"
    )


@pytest.mark.usefixtures("_loaded")
def test_the_check_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem() -> str:
        with pytest.raises(SystemExit) as error:
            check_cuda_library.check()
        return str(error.value)

    monkeypatch.setattr(check_cuda_library, "implemented", lambda folder: KERNELS | {"hardest_negatives"})
    assert problem() == "check_cuda_library: not registered for CUDA: hardest_negatives"
    # If no registration is recognised in the sources, the check fails.
    monkeypatch.setattr(check_cuda_library, "implemented", lambda folder: set())
    assert problem() == "check_cuda_library: not registered for CUDA: all"
    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/a/_C_cpu.so"})
    assert problem() == "check_cuda_library: _C_cuda is not loaded: packed reference: as tested"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert problem() == f"check_cuda_library: torch {torch.__version__} has no CUDA"


def test_what_the_sources_register_is_found() -> None:
    found = check_cuda_library.implemented(ROOT / "csrc" / "cuda")
    assert {"triplet_loss", "triplet_loss_backward", "hardest_negatives", "retrieval_ranks"} <= found
    assert found <= {name.removeprefix("itm_fast::") for name in library._registered()}


def test_without_nvcc_the_script_says_so_and_copies_nothing(tmp_path) -> None:
    result = run([shutil.which("bash"), ROOT / "tools/test_cuda_load.sh"], cwd=tmp_path, PATH=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "test_cuda_load: needs nvcc on the path\n"
