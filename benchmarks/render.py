"""Write the tables of the README and of pages under docs/, draw figures, or check both.

    python -m benchmarks.render            # rewrites them
    python -m benchmarks.render --check    # exit status 1 if one differs from the results and the cost model

A missing result file is an error: pages only show measured figures. GPU results of benchmarks/gpu_check.sh are used if
they exist.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import (
    buckets,
    coco_table,
    discriminators,
    kernel_times,
    laps,
    laps_steps,
    long_sets,
    maxsim,
    methods_table,
    micro_batches,
    reader,
    realignment,
    regulated_former,
    regulated_step,
    rivals,
    scaling,
    scenarios,
    search,
    search_columns,
    search_engines,
    search_pooling,
    selhn_gradients,
)
from benchmarks.cpu_table import markdown, of_amx, summary
from benchmarks.experiments.files import Experiment
from benchmarks.experiments.forest import draw_claims, source
from benchmarks.experiments.reading import read
from benchmarks.experiments.results import with_winners
from benchmarks.experiments.verdicts import counted, in_short, judged, verdicts_of_papers
from benchmarks.performance import tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PERFORMANCE = ROOT / "docs" / "performance"
IMAGES = ROOT / "docs" / "images"
# The pages of results by the papers' short names, and the experiments on their claims.
PAPERS = {"RCAR": "rcar", "SelHN": "selhn", "DBL": "dbl", "ADDR": "addr", "FDF": "fdf"}
EXPERIMENTS = {name: [f"{name}-claims"] for name in PAPERS.values()}
EXPERIMENTS["rcar"] += [
    "rcar-epochs",
    "rcar-rates",
    "rcar-grid",
    "rcar-seeds",
    "rcar-scenes",
    "rcar-scenes-ten",
    "demo-rar",
]
EXPERIMENTS["dbl"] += ["dbl-continued", "dbl-average", "dbl-anchors", "dbl-half", "dbl-variants", "dbl-scan"]
EXPERIMENTS["addr"].append("addr-regions")
EXPERIMENTS["selhn"] += ["selhn-rates", "selhn-variants", "selhn-attention", "selhn-bfan", "selhn-bfan-rate"]
EXPERIMENTS["fdf"] += [
    "fdf-ensemble",
    "fdf-variants",
    "fdf-start",
    "fdf-chan-seeds",
    "fdf-trained",
    "fdf-heads",
    "fdf-vse",
    "fdf-rates",
    "fdf-ensembles",
    "fdf-ensembles-vse",
]

REALIGNMENT = "python -m benchmarks.realignment --json {}"


def demo(result: dict[str, Any]) -> str:
    """Render time and recalls of one run of the demo as one sentence."""
    environment, trained = result["environment"], result["trained"]
    return (
        f"On {environment['processor']} with {environment['threads']} threads, the demo trains for "
        f"{result['seconds']:.0f} s and reaches R@1 {trained['i2t_r1']:.1f} (image to text) and "
        f"{trained['t2i_r1']:.1f} (text to image) over {result['images']} unseen pictures: a sum of recalls of "
        f"{trained['rsum']:.1f} out of 600. The untrained model reaches {result['untrained']['rsum']:.1f}.\n"
    )


def measured(
    name: str, section: Callable[[dict[str, Any]], str], command: str = "make bench ARGS='--json {}'"
) -> Callable[[], str]:
    """Return the renderer of the results in benchmarks/results/NAME.json, which `command` writes."""

    return lambda: section(result(name, command))


def result(name: str, command: str) -> dict[str, Any]:
    """Read the results in benchmarks/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        file = path.relative_to(ROOT)
        raise SystemExit(f"{file} is missing; measure it with {command.format(file)}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def gpus() -> str:
    """Render the cost model with the results of stages `bench` and times of kernels; raises SystemExit on a dry run."""
    times = RESULTS / "kernel_times.json"
    try:
        return tables(
            [json.loads(p.read_text())["results"] for p in sorted(RESULTS.glob("gpu_check_bench_*.json"))],
            json.loads(times.read_text()) if times.exists() else None,
        )
    except ValueError as error:
        raise SystemExit(f"benchmarks/results: {error}") from error


def coco() -> str:
    """Render the rehearsal on the CPU, followed by those on GPUs."""
    parts = [measured("coco_epoch", coco_table.markdown, "python -m benchmarks.coco_epoch --json {}")()]
    try:
        for path in sorted(RESULTS.glob("gpu_check_coco_*.json")):
            parts.append(coco_table.gpu_markdown(json.loads(path.read_text())["results"]))
    except ValueError as error:
        raise SystemExit(f"benchmarks/results: {error}") from error
    return "\n".join(parts)


def rival_packages() -> str:
    """Render the comparison with other packages, once it was measured on a quiet machine."""
    if not (RESULTS / "rivals.json").exists():
        return "Not measured yet: `make rivals`.\n"
    return measured("rivals", rivals.markdown, "make rivals")()


def claims() -> str:
    """Render the verdicts on the claims of the five papers."""
    return verdicts_of_papers({paper: (f"{name}.md", claimed(name)) for paper, name in PAPERS.items()})


def claims_in_numbers(folder: str) -> str:
    """Render the numbers of claims that hold; `folder` leads to the papers' pages."""
    return counted({paper: (f"{folder}{name}.md", claimed(name)) for paper, name in PAPERS.items()})


@functools.cache  # Several sections show the same experiments.
def claimed(name: str) -> list[tuple[Experiment, Path]]:
    """Return the experiments on a paper's claims, with the folders of their results."""
    found = []
    for experiment in EXPERIMENTS[name]:
        results = RESULTS / "experiments" / experiment
        found.append((with_winners(read(ROOT / "benchmarks" / "experiments" / f"{experiment}.yaml"), results), results))
    return found


def verdict(name: str) -> Callable[[], str]:
    """Return the renderer of the verdicts on a paper's claims, in short."""
    return lambda: in_short(claimed(name))


def scaled() -> str:
    """Render the projection of rehearsal and reader to more GPUs and larger data."""
    commands = {name: f"python -m benchmarks.{name} --json {{}}" for name in ("coco_epoch", "reader")}
    return scaling.markdown(*(result(name, command) for name, command in commands.items()))


# Pages with the sections between their markers.
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"cpu": measured("cpu", summary), "demo": measured("demo", demo)},
    ROOT / "docs" / "index.md": {
        "cpu": measured("cpu", summary),
        "claims": lambda: claims_in_numbers("performance/results/"),
    },
    PERFORMANCE / "benchmarks.md": {
        "cpu": measured("cpu", markdown),
        "cpu_amx": measured("cpu_amx", of_amx),
        "regulated_step": measured(
            "regulated_step", regulated_step.markdown, "python -m benchmarks.regulated_step --json {}"
        ),
        "regulated_former": measured(
            "regulated_former", regulated_former.markdown, "python -m benchmarks.regulated_former ../former --json {}"
        ),
        "kernel_times": measured("kernel_times", kernel_times.markdown, "python -m benchmarks.kernel_times NAME {}"),
        "long_sets": measured("long_sets", long_sets.markdown, "python -m benchmarks.long_sets --json {}"),
        "long_sets_rcar": measured(
            "long_sets_rcar", long_sets.markdown, "python -m benchmarks.long_sets --model rcar --json {}"
        ),
        "laps": measured("laps", laps.markdown, "python -m benchmarks.laps --json {}"),
        "scenarios": measured("scenarios", scenarios.markdown, "python -m benchmarks.scenarios --json {}"),
        "micro_batches": measured(
            "micro_batches", micro_batches.markdown, "python -m benchmarks.micro_batches --json {}"
        ),
        "methods": measured("methods", methods_table.markdown, "python -m benchmarks.methods --json {}"),
        "discriminators": measured(
            "discriminators", discriminators.markdown, "python -m benchmarks.discriminators --json {}"
        ),
        "reader": measured("reader", reader.markdown, "python -m benchmarks.reader --json {}"),
        "maxsim": measured("maxsim", maxsim.markdown, "python -m benchmarks.maxsim --json {}"),
        "rivals": rival_packages,
        "buckets": measured("buckets", buckets.markdown, "python -m benchmarks.buckets --json {}"),
        "coco": coco,
    },
    PERFORMANCE / "search.md": {
        "search": measured("search", search.markdown, "python -m benchmarks.search --run RUN --json {}"),
        "search_pooling": measured(
            "search_pooling", search_pooling.markdown, "python -m benchmarks.search_pooling --run RUN --json {}"
        ),
        "search_engines": measured(
            "search_engines", search_engines.markdown, "python -m benchmarks.search_engines --json {}"
        ),
        "search_columns": measured(
            "search_columns",
            search_columns.markdown,
            "python -m benchmarks.search_columns --index runs/search/100000-bf16 --path DIR --json {}",
        ),
    },
    PERFORMANCE / "predictions.md": {"cost model": gpus},
    PERFORMANCE / "results" / "claims.md": {"totals": lambda: claims_in_numbers(""), "claims": claims},
    **{PERFORMANCE / "results" / f"{name}.md": {"verdict": verdict(name)} for name in ("rcar", "dbl", "addr")},
    PERFORMANCE / "results" / "fdf.md": {
        "verdict": verdict("fdf"),
        "realignment": measured("realignment", realignment.markdown, REALIGNMENT),
    },
    PERFORMANCE / "results" / "selhn.md": {"verdict": verdict("selhn"), "gradients": selhn_gradients.markdown},
    PERFORMANCE / "results" / "vision.md": {
        "laps_encoders": measured(
            "laps_encoders", laps_steps.markdown, "python -m benchmarks.laps --encoders --json {}"
        )
    },
    PERFORMANCE / "scaling.md": {"scaling": scaled},
}


def rendered(page: Path, text: str) -> str:
    """Return the text of a page with everything between the markers of each section replaced by the rendered text."""
    for name, section in PAGES[page].items():
        begin, end = f"<!-- benchmark {name} -->\n", f"<!-- end of benchmark {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{page.name}: expected the lines '{begin.strip()}' and '{end}'")
        text = f"{head}{begin}{section()}{end}{tail}"
    return text


def draw_figures(page: Path, check: bool) -> None:
    """Draw the figures of a page; with `check`, exit if one of them shows other results."""
    for path, last_line, draw in _figures(page):
        if not check:
            draw(path)
        elif not path.is_file() or not path.read_text(encoding="utf-8").endswith(f"{last_line}\n"):
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python -m benchmarks.render")


def _figures(page: Path) -> Iterator[tuple[Path, str, Callable[[Path], None]]]:
    """Yield file, last line and drawing function of each figure of a page."""
    name = page.stem
    if page.parent != PERFORMANCE / "results" or name not in EXPERIMENTS:
        return
    verdicts = judged(claimed(name))
    yield IMAGES / f"claims-{name}.svg", source(verdicts), lambda path: draw_claims(path, verdicts)
    if name == "fdf":
        planes = result("realignment", REALIGNMENT)
        yield IMAGES / "fdf-realignment.svg", realignment.source(planes), lambda path: realignment.draw(path, planes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the benchmark tables of the README and of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    options = parser.parse_args()
    for page in PAGES:
        text = page.read_text()
        wanted = rendered(page, text)
        if options.check and text != wanted:
            sys.exit(f"{page.relative_to(ROOT)} is out of date: run python -m benchmarks.render")
        if not options.check:
            page.write_text(wanted)
        draw_figures(page, options.check)


if __name__ == "__main__":
    main()
