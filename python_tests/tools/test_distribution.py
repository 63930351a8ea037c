"""What a release consists of: one version everywhere, workflows that call existing files, and checks that can fail."""

import platform
import re
import subprocess
import zipfile

import check_sdist
import check_wheel
import pytest
import yaml
from native_build import find_compiler

import itm_fast
from python_tests.helpers.processes import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # Comes with pytest there.

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = {
    file.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in (ROOT / ".github/workflows").glob("*.yml")
}


def test_a_release_finds_the_version_once_in_each_of_its_files():
    settings = PYPROJECT["tool"]["bumpversion"]
    version = settings["current_version"]
    assert version == itm_fast.__version__
    for entry in settings["files"]:
        text = (ROOT / entry["filename"]).read_text(encoding="utf-8")
        assert text.count(entry["search"].replace("{current_version}", version)) == 1, entry
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version


def test_the_recipe_of_conda_has_the_requirements_of_the_package():
    recipe = yaml.safe_load((ROOT / "packaging/conda-forge/recipe.yaml").read_text(encoding="utf-8"))
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base", "pytorch-ignite": "ignite"}
    wanted = [re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in PYPROJECT["project"]["dependencies"]]
    assert sorted(recipe["requirements"]["run"]) == sorted(
        ["python", *(f"{names.get(name, name)} {version}" for name, version in wanted)]
    )
    assert recipe["about"]["license"] == PYPROJECT["project"]["license"]
    assert all((ROOT / file).exists() for file in recipe["about"]["license_file"])


def test_workflows_run_files_of_the_project():
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    called = {word for step in steps for word in step.get("run", "").split() if re.match(r"(\.ci|tools)/", word)}
    assert called == {".ci/run", "tools/check_wheel.py"}
    assert all((ROOT / file).is_file() for file in called)
    used = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), "actions are named by their commit"


def test_wheels_leave_out_the_same_libraries_everywhere():
    script = (ROOT / "tools/build_wheels.sh").read_text(encoding="utf-8")
    command = PYPROJECT["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
    left_out = re.findall(r"--exclude (\S+)", command)
    assert re.findall(r"--exclude (\S+)", script) == left_out
    assert "libtorch_cpu.so" in left_out
    pythons = [entry.removesuffix("-*") for entry in PYPROJECT["tool"]["cibuildwheel"]["build"]]
    classifiers = re.findall(r"Python :: 3\.(\d+)", "\n".join(PYPROJECT["project"]["classifiers"]))
    assert pythons == [f"cp3{minor}" for minor in classifiers]


def test_the_check_of_the_sdist_names_what_is_missing_or_too_much():
    tracked = {".gitignore", "setup.py", "examples/a.txt"}
    packed = {"setup.py", "PKG-INFO", "itm_fast.egg-info/PKG-INFO", "note.txt"}
    assert check_sdist.differences(tracked, packed) == [
        "examples/a.txt is missing: add it to MANIFEST.in",
        "note.txt is not under version control",
    ]
    assert check_sdist.differences({"setup.py"}, {"setup.py", "setup.cfg"}) == []


@pytest.fixture
def wheel(tmp_path):
    """Return a function that writes a wheel of the given tags, with changes of its files, and checks it."""
    version = itm_fast.__version__

    def write(tags, libraries, **changes):
        info = f"itm_fast-{version}.dist-info"
        files = dict.fromkeys(check_wheel.NEEDED_FILES, b"")
        files |= {f"{info}/licenses/{name}": b"" for name in check_wheel.LICENSES}
        files |= {f"{info}/METADATA": f"Name: itm_fast\nVersion: {version}\n".encode(), **libraries, **changes}
        path = tmp_path / f"itm_fast-{version}-{tags}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                if content is not None:
                    archive.writestr(name, content)
        return check_wheel.check(path).removeprefix(f"{path.name}: ")

    return write


NATIVE = {"itm_fast/_C_cpu.so": None, "itm_fast/_host.cpython-311-x86_64-linux-gnu.so": None}


def test_the_check_of_wheels_accepts_those_of_linux_and_windows(wheel):
    assert wheel("py3-none-win_amd64", {}) == "pure Python"
    if platform.system() == "Linux":
        library = (ROOT / "itm_fast/_C_cpu.so").read_bytes()
        assert wheel("cp311-cp311-manylinux_2_28_x86_64", dict.fromkeys(NATIVE, library)) == "_C_cpu, _host"


@pytest.mark.parametrize(
    ("tags", "changes", "message"),
    [
        (
            "py3-none-win_amd64",
            {"itm_fast/_C_cpu.so": b""},
            "expected pure Python for Windows, found itm_fast/_C_cpu.so",
        ),
        ("cp311-cp311-win_amd64", {}, "expected one wheel for all versions of Python, found ABI cp311"),
        ("py3-none-win_amd64", {"itm_fast/py.typed": None}, "lacks itm_fast/py.typed"),
        ("py3-none-win_amd64", {"python_tests/a.py": b""}, "installs python_tests/a.py outside the package"),
        ("cp311-cp311-linux_x86_64", dict.fromkeys(NATIVE, b""), "not repaired, expected a manylinux tag"),
        ("cp311-cp311-manylinux_2_28_x86_64", {"itm_fast/_C_cpu.so": b""}, "has the libraries .'itm_fast/_C_cpu.so'."),
        (
            "cp311-cp311-manylinux_2_28_x86_64",
            {**dict.fromkeys(NATIVE, b""), "itm_fast/.libs/libgomp.so.1": b""},
            "has the libraries",
        ),
    ],
)
def test_the_check_of_wheels_names_what_is_wrong(wheel, tags, changes, message):
    with pytest.raises(AssertionError, match=message):
        wheel(tags, changes)


def test_the_check_of_wheels_finds_what_a_library_needs(tmp_path):
    if platform.system() != "Linux":
        return
    source, library = tmp_path / "a.c", tmp_path / "liba.so"
    source.write_text("extern int b(void); int a(void) { return b(); }\n")
    compiler = [find_compiler(), "-shared", "-x", "c", source, "-x", "none", "-o"]
    other = tmp_path / "libother.so.3"
    subprocess.run([find_compiler(), "-shared", "-o", other, "-Wl,-soname,libother.so.3"], check=True)
    subprocess.run([*compiler, library, "-Wl,--no-as-needed", other], check=True)
    with pytest.raises(AssertionError, match=r"a wheel: needs libother\.so\.3, which neither torch nor a many"):
        check_wheel.check_elf("a wheel", library)
    subprocess.run([*compiler, library, "-Wl,-rpath,/opt/lib:$ORIGIN/../torch/lib"], check=True)
    with pytest.raises(AssertionError, match=r"a wheel: searches \['/opt/lib'\], expected folders beside the package"):
        check_wheel.check_elf("a wheel", library)
    subprocess.run([*compiler, library, "-Wl,-rpath,$ORIGIN/../torch/lib"], check=True)
    check_wheel.check_elf("a wheel", library)
