"""benchmarks/gpu_check.sh on a machine without a GPU: stages, limits, outcomes, and dry runs."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import gpu_environment
import gpu_stage
import gpu_suite
import pytest
import torch

from benchmarks import costs
from benchmarks.coco_epoch import growth
from benchmarks.coco_table import markdown, shares
from python_tests.helpers.processes import ROOT, run
from python_tests.tools.simulated_stage import python, written
from python_tests.tools.wheels import write_wheel

SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"


def script(*arguments: object, device: str | None = None) -> Any:
    # One thread, as in all tests: more threads are many times slower on a busy machine.
    environment = {"PYTHON3": sys.executable, "ITM_FAST_GPU_CHECK_DEVICE": device, "OMP_NUM_THREADS": 1}
    return run([SCRIPT, *arguments], cwd=ROOT, **environment)


def test_without_a_gpu_the_script_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        return
    result = script("bench")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"gpu_check: no CUDA device: torch {torch.__version__} sees none\n"
    result = script(device="tpu")
    assert result.returncode == 1
    assert result.stderr == "gpu_check: ITM_FAST_GPU_CHECK_DEVICE: expected cuda or cpu, got 'tpu'\n"


@pytest.mark.thorough
def test_a_dry_run_leaves_results_that_say_so(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    carried = write_wheel(wheels, "carried_along", "1.0").name
    options = ("--out", tmp_path, "--commit", "abc", "--wheels", wheels)
    result = script("coco", *options, device="cpu")
    assert result.returncode == 0, result.stderr
    [file] = tmp_path.glob("*.json")
    assert file.name == "gpu_check_coco_dry_run.json"
    coco = json.loads(file.read_text())
    assert coco["kind"] == "itm_fast GPU check"
    assert (coco["dry_run"], coco["outcome"]) == (True, "dry run, passed")
    assert coco["device"]["type"] == "cpu"
    assert coco["device"]["name"].startswith("dry run on ")
    assert costs.device_of(coco["device"]["name"]) is None
    assert coco["environment"]["torch"] == torch.__version__
    assert coco["environment"]["command"].startswith("benchmarks/gpu_check.sh coco --out")
    assert coco["seconds"] > 0
    assert (coco["wheels"], coco["missing_packages"]) == ([carried], [])
    assert coco["steps"][0]["detail"] in ("a dry run builds nothing", "as before")
    assert f"all results: {tmp_path}/gpu_check_dry_run.tar.gz\n" in result.stdout
    check_rehearsal(coco["results"])


def check_rehearsal(results: dict[str, Any]) -> None:
    """Check a dry run of the COCO stage: two models and an epoch, with figures of real steps."""
    assert (results["dry_run"], results["not_run"]) == (True, [])
    # 0.0005 of the 113,287 images of COCO, with five captions and four bf16 regions of width 8 each, and a header.
    assert (results["images"], results["captions"]) == (57, 285)
    assert 0 < results["store_bytes"] - 57 * 4 * 8 * 2 < 200
    assert results["packing"]["source_bytes"] == (57 + 2) * 4 * 8 * 4 + 2 * 128
    assert list(results["models"]) == ["SCAN t2i", "VSE-infinity"]
    for measured in results["models"].values():
        native = measured["native"]
        assert len(native["seconds"]) == len(native["waiting"]) == 2
        assert min(native["phases"].values()) > 0
        assert all(0 < share < 1 for share in native["waiting"])
        # On the CPU, the phases cover the timed steps: two in each of two rounds.
        assert sum(native["phases"].values()) == pytest.approx(2 * sum(native["seconds"]), rel=1e-9)
        assert sum(shares(native).values()) == pytest.approx(1)
        assert 1e8 < native["peak_host_bytes"] < 4e9
    scan, vse = results["models"].values()
    assert len(scan["loop"]["seconds"]) == 2
    assert (scan["warm_up"], vse["loop"]) == (None, None)
    assert len(vse["warm_up"]["seconds"]) == 1
    # The last batch of the 285 captions is incomplete and dropped.
    epoch = results["epoch"]
    assert (epoch["model"], epoch["steps"], len(epoch["memory_bytes"])) == ("VSE-infinity", 17, 17)
    assert growth(epoch["memory_bytes"]) == epoch["growth"]
    # 13 tokens of 4 bytes, 4 numbers of 8 bytes, a string of 49 bytes and about 7 per word, and its pointer.
    assert 150 < epoch["caption_bytes"] < 250
    with pytest.raises(ValueError, match=r"and no dry run$"):
        markdown(results)


def test_the_rehearsal_is_of_coco_s_size_where_there_is_a_gpu(
    stage: gpu_check.Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is kept for the next call. Parts without time are listed as not run, and the stage fails."""
    left_out = {"results": 1, "environment": {}, "not_run": ["SGR", "a whole epoch"]}
    ran: list[list[str]] = []

    def run(name: str, command: list[str]) -> bool:
        ran.append(command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps(left_out))
        stage.note(name, "passed", "")
        return True

    monkeypatch.setattr(stage, "run", run)
    monkeypatch.setattr(stage, "left", lambda: 10.0)
    gpu_check.coco(stage)
    measured = stage.options.out / f"{stage.file.stem}_measured.json"
    folder = ROOT / "build" / "gpu_check" / "coco"
    options = ["--json", str(measured), "--limit-s", "8", "--plan", "full"]
    expected = [sys.executable, "-m", "benchmarks.coco_epoch", *options]
    assert ran == [[*expected, "--device", "cuda", "--folder", str(folder)]]
    assert not measured.exists()
    assert not stage.finish()
    content = written(stage)
    assert content["results"] == {**left_out, "environment": content["environment"]}
    step = content["steps"][-1]
    assert (step["outcome"], step["detail"]) == ("not run", "no time was left for SGR, a whole epoch")
    assert gpu_check.RUN["coco"] is gpu_check.coco
    assert set(gpu_check.RUN) == {*gpu_check.STAGES, *gpu_check.ALONE}


def test_a_stage_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        gpu_environment.parse(["smoke"], stages=gpu_check.STAGES)
    assert error.value.code == 2
    line = "gpu_check.sh: error: no stage 'smoke': expected build+smoke, numbers, bench, sanitize"
    assert capsys.readouterr().err.splitlines()[-1] == line


@pytest.mark.parametrize(("n_files", "most", "parts"), [(90, 8, 8), (90, 1, 1), (9, 8, 2), (1, 8, 1)])
def test_every_file_of_the_suite_is_in_one_part(n_files: int, most: int, parts: int) -> None:
    files = [f"test_{number}.py" for number in range(n_files)]
    dealt = gpu_suite.dealt_out(files, most)
    assert (len(dealt), sorted(file for part in dealt for file in part)) == (parts, sorted(files))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_the_whole_suite_runs_in_parts(stage: gpu_check.Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    stage.content["missing_packages"] = []
    monkeypatch.setattr(stage, "run_together", lambda commands, judge: ran.extend(commands.values()))
    gpu_check.suite(stage)
    files = [argument for command in ran for argument in command if argument.startswith("python_tests/")]
    expected = {str(file.relative_to(ROOT)) for file in (ROOT / "python_tests").rglob("test_*.py")}
    assert sorted(files) == sorted(file for file in expected if not file.startswith("python_tests/cuda/"))
    assert all("not cuda" in command and "--noconftest" not in command for command in ran)


def test_the_suite_is_unavailable_where_packages_are_missing(stage: gpu_check.Stage) -> None:
    stage.content["missing_packages"] = ["nltk", "pytorch-ignite"]
    stage.options.wheels = Path("wheels")
    gpu_check.suite(stage)
    assert stage.finish()
    [step] = written(stage)["steps"]
    assert (step["outcome"], written(stage)["outcome"]) == ("unavailable", "unavailable")
    assert step["detail"].startswith("missing Python packages: nltk, pytorch-ignite; fetch wheels for wheels on a ")


def test_the_first_two_stages_run_every_gpu_test_once(
    stage: gpu_check.Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: dict[str, list[str]] = {}
    stage.content["missing_packages"] = ["nltk"]
    monkeypatch.setattr(stage, "run", lambda name, command, *judged, **limits: ran.setdefault(name, command))
    gpu_check.build_and_smoke(stage)
    gpu_check.numbers(stage)
    assert list(ran) == ["operators", "wrappers", "smoke", "numbers", "launches", "the rest"]
    for command in ran.values():
        files = [argument for argument in command if argument.startswith(("python_tests/", "tools/"))]
        assert len(files) == 1
        assert (ROOT / files[0]).exists()
        assert ("--noconftest" in command) == ("pytest" in command)
    assert ran["smoke"][-2:] == ["cuda", "first"]
    assert ran["wrappers"][-1] == "python_tests/cuda/test_wrappers.py"
    assert ran["launches"][-2] == "python_tests/cuda/test_launches.py"
    assert ran["numbers"][-5:] == ["python_tests/operators/test_devices.py", "-m", "cuda", "-k", "numbers"]
    assert ran["the rest"] == [*ran["numbers"][:-1], "not numbers"]
    assert capsys.readouterr().out.endswith("are left to the stage suite, and misses nltk here\n")


def run_stages(
    stages: tuple[str, ...],
    ran: Any,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: str = "passed",
) -> int:
    """Run main() on a simulated H200, with `ran` in place of every stage; return the exit status."""
    device = {"type": "cuda", "name": "NVIDIA H200"}
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *stages, "--out", str(out)])
    monkeypatch.setattr(gpu_stage, "described", lambda dry, options: {"device": device, "environment": {}})
    monkeypatch.setattr(gpu_check, "build", lambda options, dry, base: (built, "for 9.0+PTX", 1.0))
    monkeypatch.setattr(gpu_check, "RUN", dict.fromkeys(gpu_check.RUN, ran))
    with pytest.raises(SystemExit) as error:
        gpu_check.main()
    return int(error.value.code)


@pytest.mark.parametrize(
    ("stages", "left"),
    [
        ((), [200, 300, 380, 480]),
        (("sanitize",), [480]),
        (("bench", "numbers"), [480, 480]),
    ],
)
def test_each_stage_has_its_limit_and_a_first_round_has_one_for_all(
    stages: tuple[str, ...], left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes ten minutes at most, with half a minute to create the environment."""
    found: dict[str, float] = {}

    def ran(stage: gpu_check.Stage) -> None:
        found[stage.name] = stage.left()
        stage.note("the only step", "passed", "")

    # This clock stands still.
    for module in (gpu_check, gpu_stage):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0))
    assert run_stages(stages, ran, tmp_path, monkeypatch) == 0
    assert list(found) == list(stages or gpu_check.STAGES)
    assert list(found.values()) == left
    assert len(list(tmp_path.glob("*.json"))) == len(left)
    assert gpu_check.STAGES[-1] == "sanitize"
    assert max(gpu_check.LIMIT_S, gpu_check.BUILD_LIMIT_S) <= 600 - 60


def test_libraries_built_elsewhere_and_a_shorter_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_logged", lambda *_: pytest.fail("it builds"))
    options = gpu_environment.parse(["bench", "--built", "--limit-s", "90", "--out", str(tmp_path)])
    assert gpu_check.build(options, False, sys.executable) == ("passed", "built elsewhere", 0.0)
    assert gpu_check.deadlines(options.stage, 7.0, False, options.limit_s) == {"bench": 97.0}
    ends = gpu_check.deadlines(gpu_check.STAGES, 7.0, True, options.limit_s)
    assert list(ends.values()) == [pytest.approx(7.0 + share * 90 / 480) for share in (200, 300, 380, 480)]


def test_a_stage_that_fails_keeps_the_results_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One archive holds the results of all calls."""

    def ran(stage: gpu_check.Stage) -> None:
        if stage.name == "numbers":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        stage.run("step", python("print('done')"))

    assert run_stages((), ran, tmp_path, monkeypatch) == 1
    outcomes = {file.name: json.loads(file.read_text())["outcome"] for file in tmp_path.glob("*.json")}
    names = ["build_smoke", "numbers", "bench", "sanitize"]
    wanted = dict.fromkeys((f"gpu_check_{name}_nvidia_h200.json" for name in names), "passed")
    assert outcomes == {**wanted, "gpu_check_numbers_nvidia_h200.json": "failed"}
    last = json.loads((tmp_path / "gpu_check_numbers_nvidia_h200.json").read_text())["steps"][-1]
    assert last["detail"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    # A build that fails later stops the call and is packed, too.
    (tmp_path / "gpu_check_build.log").write_text("error\n")
    assert run_stages(("bench", "sanitize"), ran, tmp_path, monkeypatch, built="failed") == 1
    with tarfile.open(tmp_path / "gpu_check_nvidia_h200.tar.gz") as packed:
        found = {Path(name).name for name in packed.getnames()}
        bench = json.load(packed.extractfile("gpu_check_nvidia_h200/gpu_check_bench_nvidia_h200.json"))
    assert {*wanted, "gpu_check_build.log", "gpu_check_bench_nvidia_h200_step.log"} <= found
    assert (bench["outcome"], [step["name"] for step in bench["steps"]]) == ("failed", ["build"])


NOTING = """
import pytest

@pytest.mark.parametrize("number", [2, 1])
def test_noted(record_property, number):
    record_property("launches of triplet_loss at 9", number)
"""


def test_the_launches_that_tests_note_are_in_the_results(tmp_path: Path) -> None:
    (tmp_path / "test_noting.py").write_text(NOTING)
    report = tmp_path / "report.xml"
    assert gpu_suite.launches(report) == {}
    result = run(gpu_check.pytest("test_noting.py", f"--junitxml={report}"), cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert gpu_suite.launches(report) == {"launches of triplet_loss at 9": 2}
    assert not report.exists()
