"""benchmarks/gpu_check.sh on a machine without a GPU: stages, limits, outcomes, wheels, and dry runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import gpu_environment
import gpu_sanitize
import gpu_stage
import gpu_suite
import pytest
import torch
from packaging.requirements import Requirement

import itm_fast
from benchmarks import costs
from benchmarks.coco_epoch import growth
from benchmarks.coco_table import markdown, shares
from benchmarks.gpu_table import check_is_of_a_gpu
from python_tests.helpers.processes import ROOT, run
from python_tests.helpers.wrappers import DRIVERS
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


def test_a_dry_run_leaves_results_that_say_so(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    carried = write_wheel(wheels, "carried_along", "1.0").name
    options = ("--out", tmp_path, "--commit", "abc", "--wheels", wheels)
    result = script("sanitize", "bench", "coco", *options, device="cpu")
    assert result.returncode == 0, result.stderr
    names = {"gpu_check_sanitize_dry_run.json", "gpu_check_bench_dry_run.json", "gpu_check_coco_dry_run.json"}
    assert {file.name for file in tmp_path.glob("*.json")} == names
    for name in names:
        content = json.loads((tmp_path / name).read_text())
        assert content["kind"] == "itm_fast GPU check"
        assert content["dry_run"] is True
        assert content["device"]["type"] == "cpu"
        assert content["device"]["name"].startswith("dry run on ")
        assert costs.device_of(content["device"]["name"]) is None
        assert content["environment"]["torch"] == torch.__version__
        assert content["environment"]["command"].startswith("benchmarks/gpu_check.sh sanitize bench coco --out")
        assert content["seconds"] > 0
        assert (content["wheels"], content["missing_packages"]) == ([carried], [])
        assert content["steps"][0]["detail"] in ("a dry run builds nothing", "as before")
    assert f"all results: {tmp_path}/gpu_check_dry_run.tar.gz\n" in result.stdout
    # No step failed, but no sanitizer ran either.
    sanitize = json.loads((tmp_path / "gpu_check_sanitize_dry_run.json").read_text())
    assert sanitize["outcome"] == "dry run, unavailable"
    assert [step["outcome"] for step in sanitize["steps"]] == ["passed", "unavailable", "unavailable"]
    bench = json.loads((tmp_path / "gpu_check_bench_dry_run.json").read_text())
    assert bench["outcome"] == "dry run, passed"
    assert bench["results"]["workloads"]["scores 4"]["variants"]["native"]["flop_per_s"] > 0
    for results in (bench, bench["results"]):
        with pytest.raises(ValueError, match=r"expected kind 'itm_fast GPU benchmark'|measured without a GPU"):
            check_is_of_a_gpu(results, "bench.json")
    coco = json.loads((tmp_path / "gpu_check_coco_dry_run.json").read_text())
    assert coco["outcome"] == "dry run, passed"
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


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_check.Stage:
    """Return a stage of ten minutes on a simulated GPU."""
    device = {"type": "cuda", "name": "NVIDIA H200"}
    monkeypatch.setattr(gpu_stage, "described", lambda dry, options: {"device": device, "environment": {}})
    options = argparse.Namespace(out=tmp_path, commit=None)
    return gpu_check.Stage("build+smoke", options, time.monotonic() + 600, dry=False, short=True)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def written(stage: gpu_check.Stage) -> dict[str, Any]:
    assert stage.file.name == "gpu_check_build_smoke_nvidia_h200.json"
    return json.loads(stage.file.read_text())


def test_every_step_is_written_down_at_once(stage: gpu_check.Stage) -> None:
    assert stage.run("good", python("print('first'); print('done')"))
    assert written(stage)["outcome"] == "incomplete"
    assert not stage.run("bad", python("raise SystemExit('broken')"))
    steps = written(stage)["steps"]
    assert [(step["name"], step["outcome"], step["detail"]) for step in steps] == [
        ("good", "passed", "done"),
        ("bad", "failed", "broken"),
    ]
    assert steps[1]["command"].endswith("-c raise SystemExit('broken')")
    assert not stage.finish()
    assert written(stage)["outcome"] == "failed"
    assert not list(stage.options.out.glob("*.partial"))


ENDLESS = """
import subprocess, sys
print("begun", flush=True)
started = "import sys, time; pipe = open(sys.argv[1], 'wb', 0); pipe.write(b'.'); time.sleep(600)"
subprocess.run([sys.executable, "-c", started, *sys.argv[1:]])
"""


def test_a_step_is_stopped_at_its_limit_with_what_it_started(
    stage: gpu_check.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit passes once a child process of the step has opened a pipe. The pipe closes when the child ends."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    limits: list[float] = []

    def from_pipe() -> bytes:
        assert select.select([pipe], [], [], 300)[0], "neither written to nor closed"
        return os.read(pipe, 1)

    class Popen(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                limits.append(timeout)
                assert from_pipe() == b"."
            return super().wait(timeout and 0.01)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    assert not stage.run("endless", [*python(ENDLESS), str(tmp_path / "pipe")], limit=5)
    assert from_pipe() == b""
    os.close(pipe)
    assert limits == [5]
    stage.deadline = time.monotonic() + 1
    assert not stage.run("late", python("print('never')"))
    assert [(step["outcome"], step["detail"]) for step in written(stage)["steps"]] == [
        ("failed", "stopped after 5 s: begun"),
        ("not run", "no time was left"),
    ]


# Ends when another step that runs this code has begun.
MEETING = """
import pathlib, sys, time
own, other, said = sys.argv[1:]
pathlib.Path(own).touch()
end = time.monotonic() + 300
while not pathlib.Path(other).exists() and time.monotonic() < end:
    time.sleep(0.01)
print(said if pathlib.Path(other).exists() else "alone")
"""


def test_steps_side_by_side_are_written_down_each(stage: gpu_check.Stage, tmp_path: Path) -> None:
    one, two = str(tmp_path / "begun 1"), str(tmp_path / "begun 2")
    meeting = python(MEETING)
    stage.run_together(
        {"one": [*meeting, one, two, "1 passed"], "two": [*meeting, two, one, "2 passed"],
         "bad": python("print('1 failed')")},
        gpu_check.by_tests,
    )  # fmt: skip
    steps = written(stage)["steps"]
    assert [(step["name"], step["outcome"], step["detail"]) for step in steps] == [
        ("one", "passed", "1 passed"),
        ("two", "passed", "2 passed"),
        ("bad", "failed", "1 failed"),
    ]
    stage.deadline = time.monotonic() + 1
    stage.run_together({"late": python("print('never')")}, gpu_check.by_tests)
    assert written(stage)["steps"][-1]["detail"] == "no time was left"


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


def test_what_is_unavailable_has_not_passed(stage: gpu_check.Stage) -> None:
    stage.note("compile", "passed", "")
    stage.note("memcheck", "unavailable", "Device not supported")
    assert stage.finish()
    assert written(stage)["outcome"] == "unavailable"


@pytest.mark.parametrize(
    ("status", "summary", "outcome"),
    [
        (0, "13 passed, 2 deselected in 3.1s", "passed"),
        (0, "13 passed, 1 skipped in 3.1s", "failed"),
        (5, "no tests ran in 0.1s", "failed"),
        (0, "2 deselected in 0.1s", "failed"),
        (1, "1 failed, 12 passed in 3.1s", "failed"),
    ],
)
def test_a_test_run_that_ran_nothing_or_skipped_has_not_passed(status: int, summary: str, outcome: str) -> None:
    assert gpu_check.by_tests(status, f".....\n{summary}\n") == (outcome, summary)


REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\n========= ERROR SUMMARY: 1 error"
BARE_REFUSAL = "========= COMPUTE-SANITIZER\n========= Device not supported. Please refer to the documentation.\n"
NOTHING = "========= COMPUTE-SANITIZER\n9 operators ran: a\n========= ERROR SUMMARY: 0 errors\n"
RACES = "9 operators ran: a\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
NO_RACES = "9 operators ran: a\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, NOTHING, "passed"),
        (0, NO_RACES, "passed"),
        (7, RACES, "failed"),
        (7, NOTHING.replace("0 errors", "4 errors"), "failed"),
        (1, NOTHING, "failed"),  # The operators failed themselves.
        (0, NOTHING.replace("9 operators ran: a\n", ""), "failed"),
        (0, BARE_REFUSAL, "unavailable"),
        (0, "9 operators ran: a\n", "unavailable"),
    ],
)
def test_a_sanitizer_passes_only_by_its_own_summary(status: int, output: str, outcome: str) -> None:
    assert gpu_sanitize.judge(status, output)[0] == outcome


def test_a_sanitizer_that_misses_the_planted_fault_is_unavailable() -> None:
    planted = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 32 errors\n"
    assert gpu_sanitize.judge_control(7, planted) == ("passed", "the planted fault is found (32)")
    assert gpu_sanitize.judge_control(7, RACES)[0] == "passed"
    assert gpu_sanitize.judge_control(0, NOTHING) == ("unavailable", "it does not report a planted fault")
    refused = ("unavailable", "Device not supported. Please refer to the documentation.")
    assert gpu_sanitize.judge_control(1, BARE_REFUSAL) == refused
    assert gpu_sanitize.judge_control(1, "") == ("unavailable", "no output")


SANITIZER = """#!/bin/sh
case "$*" in
  *planted*) {control} ;;
  *) echo "2 operators ran: a, b"; echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.mark.parametrize(
    ("control", "outcome", "steps"),
    [
        ('echo "========= ERROR SUMMARY: 32 errors"; exit 7', "passed", ["passed"] * 5),
        ('echo "========= Device not supported"; exit 1', "unavailable", ["passed", *["unavailable"] * 4]),
        ('echo "========= ERROR SUMMARY: 0 errors"', "unavailable", ["passed", *["unavailable"] * 4]),
    ],
)
def test_the_operators_are_sanitized_where_the_control_passes(
    stage: gpu_check.Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    control: str,
    outcome: str,
    steps: list[str],
) -> None:
    """The compiler and the sanitizer are scripts that only print."""
    tools = {"compute-sanitizer": SANITIZER.format(control=control), "nvcc": '#!/bin/sh\necho "compiled $*"\n'}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu_sanitize.run(stage, lambda: "9.0")
    assert stage.finish()
    content = written(stage)
    assert content["outcome"] == outcome
    assert [step["outcome"] for step in content["steps"]] == steps
    assert "-arch=sm_90" in content["steps"][0]["detail"]
    names = ["compile", "memcheck control", "memcheck", "racecheck control", "racecheck"]
    assert [step["name"] for step in content["steps"]] == names
    if outcome == "passed":
        assert content["steps"][2]["detail"] == "no errors or hazards; 2 operators ran: a, b"
        # The short run uses one dtype per operator.
        assert content["steps"][4]["command"].endswith("gpu_operators.py cuda first")
        # Errors that the driver returns to torch are not out-of-bounds accesses.
        commands = [step["command"] for step in content["steps"]]
        assert ["--report-api-errors no" in command for command in commands] == [False, True, True, False, False]


def test_a_slow_sanitizer_leaves_time_to_the_next(
    stage: gpu_check.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, list[float]] = {}

    def ran(name: str, command: list[str], judge: Any = None, *limit: float, **rest: Any) -> bool:
        limits[name] = list(limit)
        return True

    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(stage, "run", ran)
    monkeypatch.setattr(stage, "left", lambda: 400.0)
    gpu_sanitize.run(stage, lambda: "9.0")
    assert (limits["memcheck"], limits["racecheck"]) == ([200.0], [400.0])


def test_the_planted_faults_compile(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        target = ["-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-o", tmp_path / "planted"]
        result = run([nvcc, *target, DRIVERS / "planted.cu"], cwd=tmp_path)
        assert result.returncode == 0, result.stderr


def distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    metadata.write_text("\n".join(lines) + "\n")


def test_missing_packages_are_named_with_those_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("old_one>=3", "deep", "gone-a", 'bird[fast]; extra == "test"', 'unseen; extra == "docs"')
    distribution(tmp_path, "thing", "1.0", *wanted)
    distribution(tmp_path, "old_one", "2.5")
    distribution(tmp_path, "deep", "1.0", "gone-b", 'nowhere; sys_platform == "none"')
    distribution(tmp_path, "bird", "1.0", 'wing; extra == "fast"', 'song; extra == "loud"')
    monkeypatch.syspath_prepend(tmp_path)
    found = gpu_environment.missing("thing", "test")
    assert found == ["gone-a", "gone-b", "old-one >=3 (found 2.5)", "wing"]
    line = gpu_check.missing_line(found, Path("wheels"))
    assert line == (
        "missing Python packages: gone-a, gone-b, old-one >=3 (found 2.5), wing; fetch wheels for wheels on a "
        f"machine with a network: python tools/gpu_wheels.py --python {platform.python_version()} "
        f"--machine {platform.machine()} --out wheels gone-a gone-b old-one wing"
    )
    assert gpu_environment.missing("not-installed") == ["not-installed"]


def test_the_environment_has_the_interpreters_packages_and_those_of_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_environment, "ENVIRONMENT", tmp_path / "environment")
    write_wheel(tmp_path, "carried_along", "1.0", code="number = 42\n")
    interpreter = gpu_environment.prepare(tmp_path)
    code = "import carried_along, numpy, sys; print(carried_along.number, numpy.__version__, sys.prefix)"
    import numpy

    result = run([interpreter, "-c", code], cwd=tmp_path)
    assert result.stdout.split() == ["42", numpy.__version__, str(tmp_path / "environment")], result.stderr
    with pytest.raises(ImportError):
        __import__("carried_along")


def test_wheels_that_cannot_be_installed_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "ENVIRONMENT", tmp_path / "environment")
    name = write_wheel(tmp_path, "of_another", "1.0", tag="cp27-cp27m-win32").name
    with pytest.raises(SystemExit) as error:
        gpu_environment.prepare(tmp_path)
    assert str(error.value) == f"gpu_check: {tmp_path}: {name} is not a supported wheel on this platform."


def test_before_it_is_installed_the_sources_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, absent = importlib.metadata.distribution, {"itm_fast"}

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    version, lines = gpu_environment.known("itm_fast")
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    before_version, before = gpu_environment.known("itm_fast")
    assert version == before_version == itm_fast.__version__
    assert {str(Requirement(line)) for line in before} == {str(Requirement(line)) for line in lines}
    assert (gpu_environment.missing(), gpu_environment.missing(extra="")) == ([], [])
    absent |= {"nltk", "hypothesis", "tensorboard"}
    assert gpu_environment.missing() == ["hypothesis", "nltk", "tensorboard"]
    assert gpu_environment.missing(extra="") == ["nltk"]
