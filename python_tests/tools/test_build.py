"""The build: symbols of the native library, and installs without a compiler or with a broken source."""

import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import check_cross
import pytest
from native_build import find_tool, find_torch

import itm_fast
from python_tests.helpers.processes import ROOT, run, run_python
from python_tests.tools.fatbin import without_device_code

LIBRARY = ROOT / "itm_fast" / "_C_cpu.so"
BUILD = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
COMPILED = itm_fast.build_info()["instruction_sets"]["compiled"]
PIP = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-index", "--no-build-isolation"]


def symbols(file, *options):
    """Return the lines (kind, mangled name) of `nm`, without versions and, on macOS, without the leading underscore."""
    lines = subprocess.run(["nm", *options, file], capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split()[-2:] for line in lines if len(line.split()) >= 2]
    prefix = "_" if platform.system() == "Darwin" else ""
    return [(kind, name.split("@")[0].removeprefix(prefix)) for kind, name in rows]


def kernel_objects(instruction_set):
    return sorted((BUILD / "CMakeFiles" / f"kernels_{instruction_set}.dir").rglob("*.o"))


def needed_symbols():
    dynamic = [] if platform.system() == "Darwin" else ["-D"]
    return [name for _, name in symbols(LIBRARY, *dynamic, "-u")]


def test_the_library_needs_the_stable_interface_alone():
    needed = needed_symbols()
    assert "aoti_torch_library_init_fragment" in needed
    assert [name for name in needed if name.startswith(("Py", "_Py"))] == []
    # The namespaces at, c10, torch and caffe, in Itanium C++ name mangling.
    assert [name for name in needed if re.match(r"_ZN[VKRO]*(2at|3c10|5torch|5caffe)", name)] == []


def test_the_library_shows_no_symbols_of_its_own():
    dynamic = ["-g"] if platform.system() == "Darwin" else ["-D"]
    defined = [name for kind, name in symbols(LIBRARY, *dynamic) if kind not in "Uw"]
    assert [name for name in defined if "itm_fast" in name] == []


def test_the_libraries_do_not_name_the_folder_that_they_were_built_in():
    libraries = sorted((ROOT / "itm_fast").glob("_*.so"))
    assert LIBRARY in libraries
    torch_root, _ = find_torch()
    assert b"csrc/cpu/triplet_loss.cpp" in LIBRARY.read_bytes()
    # Device code keeps the absolute path of its source, for profilers.
    contents = {file.name: without_device_code(file.read_bytes()) for file in libraries}
    for folder in (ROOT, torch_root):
        assert [name for name, content in contents.items() if bytes(folder) in content] == []


def test_objects_of_one_instruction_set_share_no_functions_with_others():
    # A weak symbol outside the instruction set's namespace could replace the portable copy of the same function.
    assert len(kernel_objects("portable")) > 0
    for name in COMPILED:
        namespace = f"8itm_fast{len(name)}{name}"
        for file in kernel_objects(name):
            foreign = [symbol for kind, symbol in symbols(file) if kind in "WVu" and namespace not in symbol]
            assert foreign == [], file.name


def test_only_the_kernels_hold_wide_instructions():
    if "avx2" not in COMPILED:
        return
    portable = [*kernel_objects("portable"), *(BUILD / "CMakeFiles" / "_C_cpu.dir").rglob("*.o")]
    disassembled = {file: subprocess.run(["objdump", "-d", file], capture_output=True, text=True) for file in portable}
    assert [file.name for file, listing in disassembled.items() if re.search(r"%[yz]mm", listing.stdout)] == []
    wide = subprocess.run(["objdump", "-d", kernel_objects("avx512")[0]], capture_output=True, text=True).stdout
    assert "%zmm" in wide


def test_the_cross_check_reads_what_an_object_is_for(tmp_path):
    machine = {"x86_64": "x86-64", "arm64": "arm64" if platform.system() == "Darwin" else "aarch64"}
    kind = "Mach-O" if platform.system() == "Darwin" else "ELF"
    name = machine.get(platform.machine(), platform.machine())
    assert {check_cross.architecture(file) for file in kernel_objects("portable")} == {f"{kind} {name}"}
    file = tmp_path / "object.o"
    for header, expected in (
        ("7f454c460201010000000000000000000100b700", "ELF aarch64"),
        ("cffaedfe0c000001000000000100000005000000", "Mach-O arm64"),
        ("7f454c460201010000000000000000000100f300", "ELF 243"),
    ):
        file.write_bytes(bytes.fromhex(header))
        assert check_cross.architecture(file) == expected
    file.write_text("#include <vector>\n")
    with pytest.raises(ValueError, match="neither an ELF nor a Mach-O object, it starts with 23696e636c75"):
        check_cross.architecture(file)


@pytest.fixture
def source_tree(tmp_path):
    """Copy the sources without the operator families, so that the build takes seconds."""
    tree = tmp_path / "source"
    leave_out = shutil.ignore_patterns("*.so", "__pycache__", "emoji_files", "kernels")
    for folder in ("csrc", "itm_fast", "licenses", "tools"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=leave_out)
    shutil.rmtree(tree / "csrc" / "cuda")
    for file in (
        "CMakeLists.txt",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "THIRD_PARTY.md",
        "pyproject.toml",
        "setup.py",
    ):
        shutil.copy(ROOT / file, tree)
    for source in [*(tree / "csrc" / "ops").glob("*.cpp"), *(tree / "csrc" / "cpu").glob("*.cpp")]:
        if source.name not in {"build_info.cpp", "isa.cpp"}:
            source.unlink()
    return tree


PURE_PYTHON = "itm_fast: no C++ compiler found (or Windows): installing pure Python, which runs on the packed reference"
# Run an operator three times and print its results, its code path and every warning.
USE_INSTALLED = """
import json, warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import itm_fast, itm_fast.functional as F_itm
    for _ in range(3):
        ranks = F_itm.retrieval_ranks(torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.8, 0.6]]), torch.tensor([0, 1, 0]))
print(json.dumps({
    "file": itm_fast.__file__, "ranks": [r.tolist() for r in ranks],
    "dispatch": itm_fast.build_info()["dispatch"]["retrieval_ranks"]["cpu"],
    "warnings": [[warning.category.__name__, str(warning.message)] for warning in caught],
}))
"""
ON_WINDOWS = 'import platform, torch; platform.system = lambda: "Windows"\n'
BUILD_WHEEL = """
import json, sys
sys.path.insert(0, "tools")
import build_backend
print(json.dumps([build_backend.get_requires_for_build_wheel(), build_backend.build_wheel({folder!r})]))
"""


def assert_runs_on_the_reference(target, cause, patch=""):
    """Check that the package in `target` gives the right numbers from the reference, with one warning."""
    report = json.loads(run_python(patch + USE_INSTALLED, cwd=target))
    assert report["file"] == str(target / "itm_fast" / "__init__.py")
    # Image 0: its best caption scores 0.9, more than any foreign caption. Caption 2 of image 0: image 1 scores higher.
    assert report["ranks"] == [[0, 0], [0, 0, 1]]
    assert report["dispatch"] == f"packed reference: {cause}"
    assert report["warnings"] == [["FallbackWarning", f"itm_fast runs on the packed reference: {cause}"]]


def test_without_a_compiler_the_package_installs_as_pure_python(source_tree, tmp_path):
    (tmp_path / "empty").mkdir()
    target = tmp_path / "installed"
    result = run(
        [*PIP, "--target", target, source_tree],
        cwd=tmp_path,
        PATH=tmp_path / "empty",
        CXX="/nowhere/c++",
        PYTHONPATH=None,
    )
    assert result.returncode == 0, result.stderr
    assert (result.stdout + result.stderr).count(PURE_PYTHON) == 1
    assert list(target.rglob("*.so")) == []
    [wheel_file] = target.glob("itm_fast-*.dist-info/WHEEL")
    assert "Root-Is-Purelib: true" in wheel_file.read_text()
    assert (target / "itm_fast" / "py.typed").exists()
    cause = "the native library was not built (install a C++ compiler, then install itm_fast again)"
    assert_runs_on_the_reference(target, cause)


@pytest.mark.thorough
def test_on_windows_the_package_is_pure_python_even_with_a_compiler(source_tree, tmp_path):
    build = run([sys.executable, "-c", ON_WINDOWS + BUILD_WHEEL.format(folder=str(tmp_path))], cwd=source_tree)
    assert build.returncode == 0, build.stderr
    assert (build.stdout + build.stderr).count(PURE_PYTHON) == 1
    required, name = json.loads(build.stdout.splitlines()[-1])
    assert [requirement for requirement in required if re.match("torch|cmake|ninja", requirement)] == []
    assert name == f"itm_fast-{itm_fast.__version__}-py3-none-any.whl"
    assert [file for file in zipfile.ZipFile(tmp_path / name).namelist() if file.endswith((".so", ".pyd"))] == []

    target = tmp_path / "installed"
    installation = run([*PIP, "--target", target, tmp_path / name], cwd=tmp_path)
    assert installation.returncode == 0, installation.stderr
    assert_runs_on_the_reference(target, "itm_fast has no native library for Windows", ON_WINDOWS)


@pytest.mark.thorough
def test_a_compile_error_fails_the_install(source_tree, tmp_path):
    (source_tree / "csrc" / "host" / "host.cpp").write_text('#error "this file is broken"\n')
    result = run([*PIP, "--target", tmp_path / "installed", source_tree], cwd=tmp_path)
    assert result.returncode != 0
    assert "this file is broken" in result.stdout + result.stderr
    assert not (tmp_path / "installed").exists()


def configure(tmp_path, *options, **environment):
    torch_root, _ = find_torch()
    command = [find_tool("cmake"), "-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DITM_FAST_TORCH_ROOT={torch_root}"]
    command += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    return run([*command, *options], cwd=tmp_path, **environment)


def test_cuda_on_without_nvcc_is_an_error(tmp_path):
    result = configure(tmp_path, "-DITM_FAST_CUDA=on", CUDACXX="/nowhere/nvcc")
    assert result.returncode != 0
    assert "ITM_FAST_CUDA=on, but no working nvcc was found" in result.stderr


def test_an_nvcc_without_cpp20_is_left_alone_or_an_error(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    result = configure(tmp_path, f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DPython_INCLUDE_DIR=/nowhere")
    assert result.returncode == 0, result.stderr
    assert "itm_fast: building the CPU library alone: nvcc is older than 12.0" in result.stdout
    result = configure(tmp_path, "-DITM_FAST_CUDA=on")
    assert result.returncode != 0
    assert "ITM_FAST_CUDA=on, but nvcc is older than 12.0." in result.stderr


def test_an_unknown_cuda_option_is_an_error(tmp_path):
    result = configure(tmp_path, "-DITM_FAST_CUDA=yes")
    assert result.returncode != 0
    assert "ITM_FAST_CUDA='yes': expected auto, on or off" in result.stderr


@pytest.mark.thorough
def test_without_the_headers_of_python_only_host_is_left_out(tmp_path):
    result = configure(tmp_path, "-DPython_INCLUDE_DIR=/nowhere")
    assert result.returncode == 0, result.stderr
    assert "no headers of Python found, leaving out _host: build_info() will not know the compiler" in result.stdout
    assert "_C_cpu" in (tmp_path / "build.ninja").read_text()


def test_a_folder_without_torch_is_an_error(tmp_path):
    result = configure(tmp_path, "-DITM_FAST_TORCH_ROOT=/nowhere/torch")
    assert result.returncode != 0
    assert "ITM_FAST_TORCH_ROOT='/nowhere/torch' holds no torch 2.11 or newer" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [["-m", "itm_fast"], [Path(sysconfig.get_path("scripts"), "itm-fast")]])
def test_the_command_prints_its_version(command, tmp_path):
    result = run([sys.executable, *command, "--version"], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"itm-fast {itm_fast.__version__}\n")
