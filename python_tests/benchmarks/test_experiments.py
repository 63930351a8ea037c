"""The experiment runner resumes killed runs, keeps existing results and reports missing ones."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from benchmarks import render
from itm_fast import evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji

ROOT = Path(__file__).resolve().parents[2]
TINY = {"embed_dim": 8, "word_dim": 6}
RAR = {"regulator": "rar", "steps": 2, "alignment_dim": 4}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.experiments import __main__ as experiments

    return experiments


def write(path: Path, data: Path, **changes: object) -> Path:
    """Write an experiment of two rows, two seeds and four steps per run, and a row that must equal another row."""
    content: dict[str, object] = {
        "title": "tiny", "data": str(data), "split": "dev", "seeds": [0, 1],
        "train": {"model": "scan", "model_options": TINY, "epochs": 1, "batch_size": 32, "lr": "2e-3"},
        "rows": [
            {"name": "SCAN"},
            {"name": "SCAN + RAR", "train": {"model_options": RAR}},
            {"name": "fixed", "seeds": [0], "train": {"model_options": {**RAR, "regulator": "rcar",
                                                                        "factors": "fixed"}}},
        ],
        "equal": [["SCAN + RAR", "fixed"]],
    }  # fmt: skip
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def commands(experiment: Path, *more: object) -> list[str]:
    folder = experiment.parent
    return [str(part) for part in ("run", experiment, "--results", folder / "results", "--out", folder / "runs", *more)]


def the_table(tool: ModuleType, experiment: Path) -> list[str]:
    return tool.table(tool.read(experiment), experiment.parent / "results").splitlines()


def first_recalls_and_distance(*results: dict) -> str:
    means = [statistics.mean(one["test"][name] for one in results) for name in ("i2t_r1", "t2i_r1", "mean_distance")]
    return f"{means[0]:.1f} | {means[1]:.1f} | {means[2]:.3f}"


def measured(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "results").iterdir()}


def test_an_experiment_from_nothing_to_its_table(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write(tmp_path / "small.yaml", data)
    empty = the_table(tool, experiment)
    assert empty[2:5] == [
        "| SCAN | not run | not run | not run | not run | not run | not run | not run | not run | not run |",
        "| SCAN + RAR | not run | not run | not run | not run | not run | not run | not run | not run | not run |",
        "| fixed | not run |  | not run | not run | not run | not run | not run | not run | not run |",
    ]
    assert empty[6] == "Recalls on all images of dev. No run has been measured yet."
    assert empty[8] == "fixed equals SCAN + RAR, recall by recall: not run."

    assert tool.main(commands(experiment, "--seed", 0)) == 0
    found = measured(tmp_path)
    assert sorted(found) == ["fixed-seed0", "scan-rar-seed0", "scan-seed0"]
    scan = found["scan-seed0"]
    dataset = PrecomputedDataset(data, "dev", Vocabulary.from_file(tmp_path / "runs" / "scan-seed0" / "vocab.json"))
    assert scan["test"] == evaluation.evaluate(models.load(tmp_path / "runs" / "scan-seed0"), dataset)
    assert (scan["steps"], scan["identity"]["train"]["lr"], scan["device"]) == (4, 0.002, "cpu")
    assert found["fixed-seed0"]["test"] == found["scan-rar-seed0"]["test"] != scan["test"]
    partial = the_table(tool, experiment)
    rsum, times = scan["test"]["rsum"], f"{scan['seconds']:.0f} | {scan['cpu_seconds']:.0f}"
    assert partial[2] == f"| SCAN | {rsum:.1f} | {' | '.join(['not run'] * 6)} | {times} |"
    fixed = found["fixed-seed0"]
    same, rest = f"{fixed['test']['rsum']:.1f}", first_recalls_and_distance(fixed)
    times = f"{fixed['seconds']:.0f} | {fixed['cpu_seconds']:.0f}"
    assert partial[4] == f"| fixed | {same} |  | {same} | one seed | {rest} | {times} |"
    # If several runs took equally long, the table names the first one in the order of the rows.
    in_order = [found[f"{name}-seed0"] for name in ("scan", "scan-rar", "fixed")]
    longest = max(in_order, key=lambda result: result["cpu_seconds"])
    cpu, clock = f"{longest['cpu_seconds']:.0f} CPU seconds", f"{longest['seconds']:.0f} by the clock."
    assert partial[6].endswith(f"{os.cpu_count()} cores, and the longest run took {cpu}, {clock}")
    where = scan["environment"]
    place = f" with {where['instruction_set']}, {where['threads']} thread{'s' * (where['threads'] != 1)}"
    assert f"Measured on {where['processor']}{place}" in partial[6]
    for result in found.values():
        assert 0 < result["cpu_seconds"] < 1.5 * result["environment"]["threads"] * result["seconds"] + 5
        assert min(result["load_average"].values()) >= 0
        assert result["niceness"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert partial[8] == "fixed equals SCAN + RAR, recall by recall: yes."
    command = f"python -m benchmarks.experiments run {experiment} --threads {where['threads']}"
    assert partial[-3:] == ["```", command, "```"]

    capsys.readouterr()
    assert tool.main(commands(experiment, "--row", "SCAN")) == 0
    assert capsys.readouterr().out.splitlines()[0] == "2 runs, 1 of them done before"
    second = measured(tmp_path)["scan-seed1"]
    assert measured(tmp_path)["scan-seed0"] == scan, "what was measured stays"
    mean = f"{statistics.mean([rsum, second['test']['rsum']]):.1f}"
    spread = f"{abs(rsum - second['test']['rsum']) / 2**0.5:.1f}"
    line = the_table(tool, experiment)[2].strip(" |").split(" | ")
    medians = [statistics.median([scan[name], second[name]]) for name in ("seconds", "cpu_seconds")]
    assert line[3:] == [
        mean,
        spread,
        *first_recalls_and_distance(scan, second).split(" | "),
        *(f"{median:.0f}" for median in medians),
    ]

    changed = json.loads(json.dumps(fixed))
    changed["test"]["i2t_meanr"] += 0.01
    for name, result in {**measured(tmp_path), "fixed-seed0": changed}.items():
        result["environment"]["uncommitted_changes"] = name == "fixed-seed0"
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(result))
    lines = the_table(tool, experiment)
    assert f"{place}, 1 of 4 runs with uncommitted changes. The machine's load" in lines[6]
    assert lines[8] == "fixed equals SCAN + RAR, recall by recall: NO."
    for name, result in measured(tmp_path).items():
        result["environment"]["uncommitted_changes"] = False
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(result))
    assert f"{place}. The machine's load" in the_table(tool, experiment)[6]


def test_processes_that_share_the_runs_let_other_work_go_first(data: Path, tmp_path: Path) -> None:
    experiment = write(tmp_path / "e.yaml", data, seeds=[0], rows=[{"name": "SCAN"}], equal=[])
    command = [sys.executable, "-m", "benchmarks.experiments", *commands(experiment, "--jobs", 2, "--threads", 1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("1 runs, ") == 2
    niceness = max(10, os.getpriority(os.PRIO_PROCESS, 0))
    assert [result["niceness"] for result in measured(tmp_path).values()] == [niceness]


def test_a_page_is_made_from_nothing_by_one_command(
    tool: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "small.yaml", data, seeds=[0], rows=[{"name": "SCAN"}], equal=[])
    monkeypatch.setattr(tool, "LISTS", tmp_path)
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    assert tool.main(["page", str(page)]) == 1
    assert capsys.readouterr().err == (
        f"experiments: error: {page}: expected at least one line '<!-- experiment NAME -->'\n"
    )
    page.write_text("# Page\n\n<!-- experiment small -->\n<!-- end of experiment small -->\n\nLast words.\n")
    assert tool.main(["page", str(page), "--run", "--threads", "1"]) == 0
    (result,) = (tmp_path / "results" / "small").iterdir()
    found = json.loads(result.read_text())
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Page", "Last words.")
    assert f"| SCAN | {found['test']['rsum']:.1f} | " in page.read_text()
    assert found["environment"]["threads"] == 1
    assert tool.main(["page", str(page), "--check"]) == 0

    text = page.read_text()
    page.write_text(text.replace("Recalls on", "Recall on"))
    capsys.readouterr()
    assert tool.main(["page", str(page), "--check"]) == 1
    assert capsys.readouterr().err.endswith("page.md: is out of date; write it again without --check\n")
    assert tool.main(["page", str(page)]) == 0
    assert page.read_text() == text
    # Sections of benchmarks.render belong to the page, too.
    monkeypatch.setitem(render.PAGES, page.resolve(), {"verdict": lambda: "It holds.\n"})
    drawn: list[tuple[Path, bool]] = []
    monkeypatch.setattr(render, "draw_figures", lambda page, check: drawn.append((page, check)))
    section = "<!-- benchmark verdict -->\n{}<!-- end of benchmark verdict -->\n"
    page.write_text(text + section.format(""))
    assert tool.main(["page", str(page), "--check"]) == 1
    assert tool.main(["page", str(page)]) == 0
    assert page.read_text() == text + section.format("It holds.\n")
    assert drawn == [(page.resolve(), True), (page.resolve(), False)]
    capsys.readouterr()
    (tmp_path / "small.yaml").rename(tmp_path / "other.yaml")
    assert tool.main(["page", str(page)]) == 1
    assert "small.yaml" in capsys.readouterr().err


def test_ensembles_are_evaluated_once_their_runs_are_there(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [{"name": "SCAN, two models", "row": "SCAN", "seeds": [0, 1]}]
    experiment = write(tmp_path / "e.yaml", data, rows=[{"name": "SCAN"}], equal=[], ensembles=pair)
    assert tool.main(commands(experiment, "--seed", 0)) == 0
    assert sorted(measured(tmp_path)) == ["scan-seed0"]
    assert (
        the_table(tool, experiment)[3]
        == "| SCAN, two models |  |  | not run | seeds 0, 1 | not run | not run | not run |  |  |"
    )
    assert tool.main(commands(experiment, "--threads", 1)) == 0
    folders = [tmp_path / "runs" / f"scan-seed{seed}" for seed in (0, 1)]
    dataset = PrecomputedDataset(data, "dev", Vocabulary.from_file(folders[0] / "vocab.json"))
    scores = [evaluation.score_matrix(models.load(folder), dataset) for folder in folders]
    expected = evaluation.evaluate_scores(sum(scores) / 2, dataset.caption_image)
    found = measured(tmp_path)["scan-two-models"]
    # The mean distance is a difference of float32 scores within [-1, 1], so it needs an absolute tolerance.
    assert found["test"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
    mean, rest = f"{found['test']['rsum']:.1f}", first_recalls_and_distance(found)
    line = f"| SCAN, two models |  |  | {mean} | seeds 0, 1 | {rest} |  |  |"
    assert the_table(tool, experiment)[3] == line

    # An existing evaluation is kept. It is valid only for the runs that it was made from.
    result = tmp_path / "results" / "scan-two-models.json"
    content = result.read_bytes()
    assert tool.main(commands(experiment)) == 0
    assert result.read_bytes() == content
    member = tmp_path / "results" / "scan-seed1.json"
    text = member.read_text()
    weights = json.loads(text)["weights"]
    member.write_text(text.replace(weights, "0" * 64))
    capsys.readouterr()
    assert tool.main(commands(experiment)) == 1
    assert capsys.readouterr().err == (
        f"experiments: error: {result}: belongs to other runs than the current ones; move it away to evaluate again\n"
    )
    result.unlink()
    assert tool.main(commands(experiment)) == 1
    assert capsys.readouterr().err == (
        f"experiments: error: {folders[1]}: expected the weights that {member} was measured with\n"
    )
    assert not result.exists()


def test_an_ensemble_of_rows_is_their_mean(tool: ModuleType, data: Path, tmp_path: Path) -> None:
    """As "All" in RCAR's Table I: two directions that are trained apart."""
    ways = [{"name": name, "train": {"model_options": {"direction": name}}} for name in ("t2i", "i2t")]
    together = [{"name": "All", "rows": ["t2i", "i2t"], "seed": 3}]
    experiment = write(tmp_path / "e.yaml", data, seeds=[3], rows=ways, equal=[], ensembles=together)
    assert tool.main(commands(experiment, "--threads", 1)) == 0
    folders = [tmp_path / "runs" / f"{name}-seed3" for name in ("t2i", "i2t")]
    dataset = PrecomputedDataset(data, "dev", Vocabulary.from_file(folders[0] / "vocab.json"))
    scores = [evaluation.score_matrix(models.load(folder), dataset) for folder in folders]
    expected = evaluation.evaluate_scores(sum(scores) / 2, dataset.caption_image)
    found = measured(tmp_path)["all"]
    assert found["test"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
    line = f"| All |  | {found['test']['rsum']:.1f} | seed 3 | {first_recalls_and_distance(found)} |  |  |"
    assert the_table(tool, experiment)[4] == line


def test_ensembles_with_seeds_are_a_row_of_claims(tool: ModuleType, data: Path, tmp_path: Path) -> None:
    pairs = [{"name": "pairs", "row": "SCAN", "groups": [[0, 2], [1, 3]]}]
    claims = [{"text": "one beats two", "row": "SCAN", "over": "pairs"}]
    more = {"seeds": [0, 1, 2, 3], "rows": [{"name": "SCAN"}], "equal": [], "ensembles": pairs, "claims": claims}
    experiment = write(tmp_path / "e.yaml", data, **more)
    assert tool.main(commands(experiment, "--seed", 0)) == 0
    claim = "| one beats two | SCAN minus pairs | sum of recalls |"
    assert f"{claim} 0 | not run |  | not run |" in the_table(tool, experiment)
    assert tool.main(commands(experiment, "--threads", 1)) == 0
    found = measured(tmp_path)
    assert sorted(found["pairs-seed1"]["identity"]["members"]) == ["scan-seed1", "scan-seed3"]
    sums = [found[f"pairs-seed{seed}"]["test"]["rsum"] for seed in (0, 1)]
    differences = [found[f"scan-seed{seed}"]["test"]["rsum"] - sums[seed] for seed in (0, 1)]
    lines = the_table(tool, experiment)
    row = (
        f"| pairs | {sums[0]:.1f} | {sums[1]:.1f} |  |  | {statistics.mean(sums):.1f} | {statistics.stdev(sums):.1f} |"
    )
    assert lines[3].startswith(row)
    assert [line for line in lines if line.startswith(f"{claim} 2 | {statistics.mean(differences):+.1f} | ")]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tools!r})
import torch; torch.set_num_threads(1)
from benchmarks.experiments import __main__ as experiments
from itm_fast.training import trainer
save, saves = trainer.checkpoint.save_state, []
def killed(*arguments):
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    saves.append(save(*arguments))
trainer.checkpoint.save_state = killed
experiments.main({arguments!r})
"""


def test_a_killed_run_goes_on_where_it_stood(tool: ModuleType, data: Path, tmp_path: Path) -> None:
    """A run that was killed and resumed gives exactly the result of an uninterrupted run."""
    train = {"model": "scan", "model_options": TINY, "epochs": 2, "batch_size": 32, "lr": 2e-3, "save_every": 2}
    rows = [{"name": "one", "seeds": [3]}]
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "e.yaml", data, train=train, rows=rows, equal=[])
    killed = tmp_path / "killed" / "e.yaml"
    script = KILLED.format(tools=str(ROOT / "tools"), arguments=commands(killed))
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == -9
    run = tmp_path / "killed" / "runs" / "one-seed3"
    assert (run / "last" / "checkpoint.pt").is_file()
    assert not (tmp_path / "killed" / "results").exists()
    assert the_table(tool, killed)[2] == f"| one | {' | '.join(['not run'] * 8)} |"

    assert tool.main(commands(killed)) == 0
    assert tool.main(commands(tmp_path / "whole" / "e.yaml")) == 0
    first, second = (measured(tmp_path / name)["one-seed3"] for name in ("killed", "whole"))
    assert first["test"] == second["test"]
    assert (first["steps"], first["best_step"], first["validation"]) == (
        8, second["best_step"], second["validation"],
    )  # fmt: skip
    assert first["cpu_seconds"] is None, "what the killed process took is not known"
    assert the_table(tool, killed)[2].endswith(f"| {first['seconds']:.0f} | not known |")
    # A complete run without a result is evaluated again, not trained again.
    (tmp_path / "killed" / "results" / "one-seed3.json").unlink()
    before = (run / "model.safetensors").read_bytes()
    assert tool.main(commands(killed)) == 0
    assert measured(tmp_path / "killed")["one-seed3"]["test"] == first["test"]
    assert (run / "model.safetensors").read_bytes() == before


def test_other_settings_are_refused(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "one"}]
    experiment = write(tmp_path / "e.yaml", data, rows=rows, seeds=[0], equal=[])
    assert tool.main(commands(experiment)) == 0
    result = tmp_path / "results" / "one-seed0.json"
    content = result.read_bytes()
    train = {"model": "scan", "model_options": TINY, "epochs": 1, "batch_size": 32, "lr": 3e-3}
    write(experiment, data, rows=rows, seeds=[0], equal=[], train=train)
    capsys.readouterr()
    for arguments in (commands(experiment), ["table", str(experiment), "--results", str(result.parent)]):
        assert tool.main(arguments) == 1
        assert capsys.readouterr().err == (
            f"experiments: error: {result}: was measured with lr = 0.002, not 0.003; move it away to measure again, or "
            "undo the change\n"
        )
    assert result.read_bytes() == content
    # Without the result, the RUN folder still holds a run with other settings.
    result.unlink()
    assert tool.main(commands(experiment)) == 1
    assert "one-seed0: holds a run with lr = 0.002, not 0.003" in capsys.readouterr().err
    # Settings that cannot change the result may differ. A setting missing from an older result had its default.
    write(experiment, data, rows=rows, seeds=[0], equal=[])
    older = json.loads(content)
    del older["identity"]["train"]["text_augmentation"]
    result.write_text(json.dumps(older))
    assert tool.main(commands(experiment, "--threads", 1)) == 0
    write(experiment, data, rows=rows, seeds=[0], equal=[], images=3)
    assert tool.main(commands(experiment)) == 1
    assert "was measured with images = None, not 3" in capsys.readouterr().err


def test_other_data_are_refused(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result is valid only for the data that it was measured on."""
    own = tmp_path / "data"
    shutil.copytree(data, own)
    experiment = write(tmp_path / "e.yaml", own, rows=[{"name": "one"}, {"name": "two"}], seeds=[0], equal=[])
    table = ["table", str(experiment), "--results", str(tmp_path / "results")]
    assert tool.main(commands(experiment)) == 0
    result = tmp_path / "results" / "one-seed0.json"
    content = result.read_bytes()
    capsys.readouterr()
    assert tool.main(table) == 0
    text = capsys.readouterr().out
    for name in ("train_caps.txt", "train_ims.npy", "dev_caps.txt", "dev_ims.npy"):
        before = (own / name).read_bytes()
        after = bytearray(before)
        after[-2] ^= 1
        (own / name).write_bytes(after)
        for arguments in (commands(experiment), table):
            assert tool.main(arguments) == 1
            assert capsys.readouterr().err == (
                f"experiments: error: {result}: was measured with other content of {name}; move it away to measure "
                "again, or undo the change\n"
            )
        (own / name).write_bytes(before)
    assert result.read_bytes() == content
    assert tool.main(commands(experiment)) == 0
    # A result without fingerprints of its data is rejected.
    silent = json.loads(content)
    del silent["identity"]["fingerprints"]
    result.write_text(json.dumps(silent))
    assert tool.main(table) == 1
    assert "one-seed0.json: expected a result of an experiment, with its settings and what its data held" in (
        capsys.readouterr().err
    )
    # If the data are missing, the results must agree at least on the evaluation data.
    shutil.rmtree(own)
    result.write_bytes(content)
    assert tool.main(table) == 0
    assert capsys.readouterr().out == text
    other = json.loads(content)
    other["identity"]["fingerprints"]["evaluation"]["dev_caps.txt"] = "0" * 64
    result.write_text(json.dumps(other))
    assert tool.main(table) == 1
    assert "results: expected recalls on the same images and captions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown setting 'sedes': did you mean 'seeds'?"),
        ({"seeds": "all"}, "seeds: expected a list, got 'all'"),
        ({"rows": [{"train": {}}]}, "name: this setting of row 1 is required"),
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "rows: 'a' appears twice"),
        ({"rows": [{"name": "a", "seeds": []}]}, "seeds of 'a': expected at least one, got []"),
        ({"rows": [{"name": "a b"}, {"name": "A-B"}], "equal": []},
         "rows: two runs would write the same result file; change a name"),
        ({"equal": [["SCAN", "none"]]}, "equal: expected two names of rows, got ['SCAN', 'none']"),
        ({"train": {"modle": "scan"}}, "unknown setting 'modle': did you mean 'model'?"),
        ({"train_images": 5}, "train_images: only applies to the bundled data (data: emoji)"),
        ({"rows": [{"name": "a", "train": {"scenario": "oas"}}], "equal": []},
         "anchor_row: the row 'a' with the scenario oas needs one"),
        ({"rows": [{"name": "a", "train": {"scenario": "oas", "anchor": "runs/b"}}], "equal": []},
         "anchor: expected anchor_row, the name of a row, because the content of a folder may change"),
        ({"rows": [{"name": "a", "anchor_row": "b", "train": {"scenario": "oas"}}, {"name": "b"}], "equal": []},
         "anchor_row: expected the name of a row above it, got 'b'"),
        ({"rows": [{"name": "a", "seeds": [0]}, {"name": "b", "anchor_row": "a", "train": {"scenario": "oas"}}],
          "equal": []}, "anchor_row: 'a' lacks a seed of 'b'"),
        ({"rows": [{"name": "a"}, {"name": "b", "anchor_row": "a"}], "equal": []},
         "anchor: 'a-seed0' goes with the scenario oas, not single"),
        ({"rows": [{"name": "a", "train": {"start": "runs/b"}}], "equal": []},
         "start: expected start_row, the name of a row, because the content of a folder may change"),
        ({"rows": [{"name": "a", "start_row": "b"}, {"name": "b"}], "equal": []},
         "start_row: expected the name of a row above it, got 'b'"),
        ({"rows": [{"name": "a"}, {"name": "b", "start_row": "a", "anchor_row": "a", "train": {"scenario": "oas"}}],
          "equal": []}, "start_row: expected no anchor_row beside it in 'b'"),
        ({"rows": [{"name": "a", "seeds": [0]}, {"name": "b", "start_row": "a"}], "equal": []},
         "start_row: 'a' lacks a seed of 'b'"),
        ({"ensembles": [{"name": "a", "row": "SCAN", "seeds": [0, 2]}]},
         "seeds of 'a': expected several seeds of the row 'SCAN', got [0, 2]"),
        ({"ensembles": [{"name": "a", "row": "SCAM", "seeds": [0, 1]}]},
         "seeds of 'a': expected several seeds of the row 'SCAM', got [0, 1]"),
        ({"ensembles": [{"name": "a", "row": "fixed", "seeds": [0]}]},
         "seeds of 'a': expected several seeds of the row 'fixed', got [0]"),
        ({"ensembles": [{"name": "a", "rows": ["SCAN", "fixed"], "seed": 1}]},
         "rows of 'a': expected several rows with seed 1, got ['SCAN', 'fixed']"),
        ({"ensembles": [{"name": "a", "rows": ["SCAN", "SCAN"]}]},
         "rows of 'a': expected several rows with seed 0, got ['SCAN', 'SCAN']"),
        ({"ensembles": [{"name": "a", "seeds": [0, 1]}]}, "row: this setting of an ensemble is required"),
        ({"ensembles": [{"name": "a", "row": "SCAN", "groups": [[0, 1], [1, 0]]}]},
         "groups of 'a': expected each seed once, got [0, 1, 1, 0]"),
        ({"ensembles": [{"name": "a", "row": "SCAN", "groups": []}]},
         "groups of 'a': expected at least one list of seeds, got []"),
        ({"ensembles": [{"name": "a", "row": "SCAN", "seeds": [0, 1]},
                        {"name": "a", "row": "SCAN", "groups": [[0, 1]]}]},
         "ensembles: 'a' appears twice"),
        ({"ensembles": [{"name": "a", "row": "SCAN", "groups": [0, 1]}]},
         "seeds of 'a': expected several seeds of the row 'SCAN', got 0"),
        ({"ensembles": [{"name": "a", "row": "SCAN", "seeds": [0, 1]}],
          "claims": [{"text": "c", "row": "SCAN", "over": "a"}]}, "unknown row of a claim 'a'"),
        ({"ensembles": [{"name": "scan seed0", "row": "SCAN", "seeds": [0, 1]}]},
         "rows: two runs would write the same result file; change a name"),
        ({"figures": [{"file": "a.svg", "shows": "losses", "text": "a", "rows": ["SCAN"]}]},
         "shows: expected training or scores, got 'losses'"),
        ({"figures": [{"file": "../a.svg", "shows": "scores", "text": "a", "rows": ["SCAN"]}]},
         "file: expected the name of an SVG file, got '../a.svg'"),
        ({"figures": [{"file": "a.svg", "shows": "scores", "text": "a", "rows": ["fixed"], "seed": 1}]},
         "rows of a.svg: expected rows with seed 1, got 'fixed'"),
        ({"figures": [{"file": "a.svg", "shows": "scores", "rows": ["SCAN"]}]},
         "text: this setting of a figure is required"),
        ({"seeds": [-1]}, "seed: expected a number at least 0 and at most 18446744073709551615, got -1"),
    ],
)  # fmt: skip
def test_experiments_that_are_wrong(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, message: str
) -> None:
    experiment = write(tmp_path / "e.yaml", data, **changes)
    assert tool.main(commands(experiment)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_bundled_data_can_be_cut(tool: ModuleType, tmp_path: Path) -> None:
    for split in emoji.SPLITS:
        assert len(emoji.captions(split)) == 5 * len(emoji.pictures(split))
    folder = tool.bundled_data(tmp_path, 7)
    vocabulary = Vocabulary.from_file(folder / "vocab.json")
    assert vocabulary == emoji.vocabulary()
    train = PrecomputedDataset(folder, "train", vocabulary)
    kept = [0, 403, 806, 1209, 1612, 2015, 2418]
    assert (emoji.pictures_of(train.features) == emoji.pictures("train")[kept]).all()
    assert train.captions == [emoji.captions("train")[5 * image + number] for image in kept for number in range(5)]
    assert PrecomputedDataset(folder, "dev", vocabulary).captions == emoji.captions("dev")
    with pytest.raises(ValueError, match=r"^train_images: expected a number from 1 to 2821, got 2822$"):
        tool.bundled_data(tmp_path, 2822)

    # The fingerprints of the bundled data are computed without writing files.
    path = tmp_path / "e.yaml"
    path.write_text("{title: t, data: emoji, train_images: 7, split: dev, rows: [{name: a}], train: {model: scan}}")
    experiment = tool.read(path)
    found = experiment.fingerprints(experiment.rows["a"][0])
    for use, split in (("train", "train"), ("validation", "dev"), ("evaluation", "dev")):
        texts = (folder / f"{split}_caps.txt").read_text().removesuffix("\n"), (folder / "vocab.json").read_text()
        features = PrecomputedDataset(folder, split, vocabulary).features
        expected = [hashlib.sha256(part.encode()).hexdigest() for part in texts]
        assert found[use] == {
            f"{split}_caps.txt": expected[0],
            f"{split}_ims.npy": hashlib.sha256(features.tobytes()).hexdigest(),
            "vocab.json": expected[1],
        }
