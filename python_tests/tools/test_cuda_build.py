"""The build of csrc/cuda: dependencies, contents and symbols of `_C_cuda`, and the choice of architectures.

Without nvcc, or with ITM_FAST_CUDA=off, the tests check that there is no `_C_cuda`. No GPU is needed.
"""

import re
import shutil
import subprocess

import pytest
import torch
from device_code import count_instructions
from native_build import find_tool

import itm_fast
from itm_fast.ops import library
from python_tests.helpers.processes import BUILDS_CUDA, ROOT, run, run_python
from python_tests.tools.fatbin import device_code

LIBRARY = ROOT / "itm_fast" / "_C_cuda.so"
NVCC = shutil.which("nvcc")
OPERATORS = (
    "boosting_loss",
    "boosting_loss_backward",
    "boosting_loss_with_gradient",
    "cross_attention_alignments",
    "cross_attention_alignments_backward",
    "cross_attention_scores",
    "cross_attention_scores_backward",
    "domain_regularization",
    "domain_regularization_backward",
    "triplet_loss",
    "triplet_loss_backward",
    "triplet_loss_with_gradient",
    "scale_gradient",
    "hardest_negatives",
    "hardest_negatives_backward",
    "matching_loss",
    "maxsim_scores",
    "maxsim_scores_backward",
    "regulated_scores",
    "regulated_scores_backward",
    "retrieval_ranks",
)
DEFAULT = "80-real;86-real;89-real;90-real;90-virtual"
PRODUCT = ROOT / "python_tests/native/shim/product.cu"


def is_built() -> bool:
    """Check that the library exists if and only if it should, and return whether it exists."""
    assert LIBRARY.exists() == BUILDS_CUDA
    assert itm_fast.build_info()["libraries"]["_C_cuda"] == (str(LIBRARY) if LIBRARY.exists() else None)
    return LIBRARY.exists()


def lines(*command: object) -> list[str]:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_torch_cuda_is_needed_and_the_cuda_runtime_is_not() -> None:
    if is_built():
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", "\n".join(lines("readelf", "-d", LIBRARY)))
        assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(needed)
        assert [name for name in needed if "cudart" in name or "libcuda." in name] == []


def test_the_library_implements_and_defines_nothing() -> None:
    if is_built():
        needed = [line.split()[-1].split("@")[0] for line in lines("nm", "-D", "-u", LIBRARY) if line]
        assert "aoti_torch_library_init_impl" in needed
        assert "aoti_torch_get_current_cuda_stream" in needed
        assert [name for name in needed if re.match("aoti_torch_library_(init_(def|fragment)|def)", name)] == []
        assert [name for name in needed if re.match(r"_?Py|_ZN[VKRO]*(2at|3c10|5torch|5caffe)", name)] == []
        shown = [line for line in lines("nm", "-D", "--defined-only", LIBRARY) if "itm_fast" in line]
        assert shown == []


def test_no_launcher_calls_a_function_of_the_device() -> None:
    """If a host template calls a device function, nvcc replaces the call with `exit` and gives no warning."""
    if is_built():
        needed = [line.split()[-1].split("@")[0] for line in lines("nm", "-D", "-u", LIBRARY) if line]
        assert "exit" not in needed


def test_every_source_holds_code_for_every_architecture() -> None:
    if is_built():
        expected = set()
        for name in itm_fast.build_info()["cuda_architectures"]:
            number, _, kind = name.partition("-")
            if kind != "virtual":
                expected.add(f"sm_{number}")
            if kind != "real":
                expected.add(f"ptx_{number}")
        found = device_code(LIBRARY.read_bytes())
        assert found == [expected] * len(list((ROOT / "csrc/cuda").glob("*.cu")))


def test_the_wrappers_become_the_instructions_they_stand_for(tmp_path) -> None:
    """Compiling to machine code for the oldest and the newest GPU proves that the PTX is well-formed."""
    if is_built():
        options = ["-std=c++20", "--expt-relaxed-constexpr", "-I", ROOT / "csrc/include", "-Werror", "all-warnings"]
        for number in (80, 90):
            target = ["-arch", f"sm_{number}", "-Xptxas", "-v", "--keep", "--keep-dir", tmp_path]
            command = [NVCC, *options, *target, "-cubin", "-o", tmp_path / "product.cubin", PRODUCT]
            result = run(command, cwd=tmp_path)
            assert result.returncode == 0, result.stderr
            assert set(re.findall(r"(\d+) bytes spill", result.stderr)) == {"0"}
            counts = count_instructions((tmp_path / "product.cubin").read_bytes())
            assert len(counts) == 2
            assert min(counts.values()) > 0
        [ptx] = tmp_path.glob("*.ptx")
        text = ptx.read_text()
        for instruction in (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
            "cp.async.cg.shared.global",
            "cp.async.commit_group",
            "cp.async.wait_group 1",
            "bar.sync",
            "bar.warp.sync",
        ):
            assert instruction in text


@pytest.fixture
def choose(tmp_path):
    """Return the architectures that CMake chooses if nvcc supports the given ones."""

    def choose(known: str, *options: str, wanted: str | None = None) -> tuple[int, str]:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(f"#!/bin/sh\nfor n in {known}; do echo compute_$n; done\n")
        nvcc.chmod(0o755)
        script = tmp_path / "choose.cmake"
        script.write_text(
            f'include("{ROOT / "csrc/cuda/architectures.cmake"}")\n'
            'itm_fast_cuda_architectures(chosen)\nmessage("chosen ${chosen}")\n'
        )
        command = [find_tool("cmake"), f"-DCMAKE_CUDA_COMPILER={nvcc}", *options, "-P", script]
        result = run(command, cwd=tmp_path, TORCH_CUDA_ARCH_LIST=wanted)
        return result.returncode, " ".join(result.stderr.split())

    return choose


@pytest.mark.parametrize(
    ("known", "options", "wanted", "chosen"),
    [
        ("75 80 86 87 89 90 100 120", (), None, DEFAULT),
        ("75 80 86 89 90", (), "", DEFAULT),
        ("70 75 80 86", (), None, "80-real;86-real;86-virtual"),
        ("80 86 89 90 100", (), "8.0 9.0+PTX", "80-real;90-real;90-virtual"),
        ("80 86 89 90 100", (), "9.0a;10.0", "90a-real;100-real"),
        ("80 86 89 90", ("-DCMAKE_CUDA_ARCHITECTURES=89",), "9.0", "89"),
    ],
)
def test_the_choice_of_architectures(choose, known, options, wanted, chosen) -> None:
    assert choose(known, *options, wanted=wanted) == (0, f"chosen {chosen}")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("Ampere", "TORCH_CUDA_ARCH_LIST: expected architectures such as 8.0 or 9.0+PTX, got 'Ampere'"),
        ("7.5", "TORCH_CUDA_ARCH_LIST: the kernels need 8.0 or newer, got '7.5'"),
        ("8.0 12.0", "TORCH_CUDA_ARCH_LIST: this nvcc does not know '12.0'"),
    ],
)
def test_architectures_that_cannot_be_are_an_error(choose, wanted, message) -> None:
    status, text = choose("75 80 86 89 90", wanted=wanted)
    assert status != 0
    assert message in text


def test_without_cuda_in_torch_the_library_is_left_alone(monkeypatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert library._load_cuda_library() is None
    assert loaded == []


def test_with_cuda_in_torch_the_library_is_loaded(monkeypatch, tmp_path) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(library, "library_folder", lambda: tmp_path)
    missing = "the CUDA library was not built (install nvcc, then install itm_fast again)"
    assert library._load_cuda_library() == missing
    assert loaded == []
    path = tmp_path / "_C_cuda.so"
    path.write_bytes(b"")
    assert library._load_cuda_library() is None
    assert loaded == [path]


def test_a_cuda_library_that_cannot_be_loaded_is_named(monkeypatch, tmp_path) -> None:
    path = tmp_path / "_C_cuda.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(library, "library_folder", lambda: tmp_path)
    problem = library._load_cuda_library()
    assert problem is not None
    assert problem.startswith(f"{path} could not be loaded ({path}: ")
    monkeypatch.setattr(library, "_cuda_problem", problem)
    assert library._path_of("triplet_loss", "cuda") == f"packed reference: {problem}"
    assert library._path_of("triplet_loss", "cpu").startswith("native ")


def test_every_operator_is_registered() -> None:
    """If torch has no CUDA, the stub of libtorch_cuda that the library was linked with replaces libtorch_cuda."""
    if not is_built():
        return
    stubs = [str(stub) for stub in sorted((ROOT / "build").glob("native-*/torch_cuda_stub/libtorch_cuda.so"))[:1]]
    assert len(stubs) == 1
    code = f"""
import ctypes, itm_fast.functional, torch
for stub in {[] if torch.version.cuda else stubs!r}:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library({str(LIBRARY)!r})
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
print([name for name in {OPERATORS!r} if has_kernel("itm_fast::" + name, "CUDA")])
"""
    assert run_python(code).strip() == str(list(OPERATORS))
