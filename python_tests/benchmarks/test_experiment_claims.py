"""What the pages of the experiments of SelHN, DBL, ADDR and FDF say beside their tables is what their results hold."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "experiments"
MODELS = {"VSE (FC)": "vse-fc", "VSE (MLP)": "vse-mlp", "RVSE (MLP)": "rvse-mlp"}
LOSSES = {"HN": "hardest-hn", "SelHN": "selhn"}
SEEDS = (0, 1, 2)
FDF_ROWS = (
    "chan", "n-2-fc", "n-2-fc-rts", "n-2-fc-rts-rw-fdf", "fdf-n-1", "fdf-n-4", "fdf-n-8", "fdf-other-batches-kept",
    "n-2-none-in-place-of-ffn", "n-2-adapter-in-place-of-ffn",
)  # fmt: skip


def result(experiment: str, row: str, seed: int = 0) -> dict[str, Any]:
    return json.loads((RESULTS / experiment / f"{row}-seed{seed}.json").read_text())


def rsum(experiment: str, row: str, seed: int = 0) -> float:
    return result(experiment, row, seed)["test"]["rsum"]


def median(experiment: str, row: str, seed: int, name: str, first: int, last: int) -> float:
    curves = result(experiment, row, seed)["curves"]["train"]
    return statistics.median(
        value for value, step in zip(curves[name], curves["step"], strict=True) if first <= step <= last
    )


def medians(model: str, loss: str, name: str, first: int, last: int) -> list[float]:
    return [median("selhn", f"{MODELS[model]}-{LOSSES[loss]}", seed, name, first, last) for seed in SEEDS]


def text_of(name: str) -> str:
    """The page without its experiments' own parts, in one line."""
    page = (ROOT / "docs" / name).read_text()
    return " ".join(re.sub("<!-- experiment .*?<!-- end of", "", page, flags=re.DOTALL).split())


def test_selhn_says_how_gradients_run() -> None:
    page = (ROOT / "docs" / "results" / "selhn.md").read_text()
    head = re.search(r"\| steps \| (.*) \|\n", page)
    assert head is not None
    bands = [tuple(map(int, band.split(" to "))) for band in head[1].split(" | ")]
    found = {}
    for model in MODELS:
        for loss in LOSSES:
            found[model, loss] = [medians(model, loss, "image_grad_norm", *band) for band in bands]
            cells = [f"{min(values):.1f} to {max(values):.1f}" for values in found[model, loss]]
            assert f"| {model}: {loss} | {' | '.join(cells)} |\n" in page
        # From step 60 on HN's fall; SelHN's are the smaller ones up to step 100 and the larger ones after 300.
        hardest, selective = found[model, "HN"], found[model, "SelHN"]
        ratios = [[a / b for a, b in zip(*both, strict=True)] for both in zip(hardest, selective, strict=True)]
        assert all(a > b > c for a, b, c in zip(*hardest[1:], strict=True))
        assert min(ratios[0] + ratios[1]) > 1 > max(ratios[3])
        low, high = (1 / 10, 1 / 5.5) if model == "VSE (MLP)" else (1.9, 3)
        assert low < min(ratios[2]) <= max(ratios[2]) < high


def test_selhn_says_what_scores_and_recalls_do() -> None:
    gaps = {loss: [gap for model in MODELS for gap in medians(model, loss, "hardest_gap", 310, 440)] for loss in LOSSES}
    assert [f"{f(gaps['HN']):.3f}" for f in (min, max)] == ["0.001", "0.002"]
    assert [f"{f(gaps['SelHN']):.2f}" for f in (min, max)] == ["0.04", "0.07"]
    sums = {(m, x): [rsum("selhn", f"{MODELS[m]}-{LOSSES[x]}", seed) for seed in SEEDS] for m in MODELS for x in LOSSES}
    assert all(min(sums[model, "SelHN"]) - max(sums[model, "HN"]) > 180 for model in MODELS)
    said = text_of("results/selhn.md")
    for model in MODELS:
        means = [f"{statistics.mean(sums[model, loss]):.0f}" for loss in ("SelHN", "HN")]
        assert re.search(f"{means[0]} against {means[1]} for {re.escape(model)}", said), model
    assert all(a > b for a, b in zip(sums["VSE (MLP)", "HN"], sums["VSE (FC)", "HN"], strict=True))
    assert all(a > b for a, b in zip(sums["VSE (MLP)", "SelHN"], sums["RVSE (MLP)", "SelHN"], strict=True))
    above = {
        (model, loss): rsum("selhn", f"{row}-{loss}") - statistics.mean(sums[model, "SelHN"])
        for model, row in MODELS.items()
        for loss in ("all-negatives", "semi-hard-shn", "contrastive-sct")
    }
    best = [above[model, "semi-hard-shn"] for model in MODELS]
    assert f"Here SHN does best on each model, {min(best):.0f} to {max(best):.0f} above the mean of SelHN" in said
    for model, row in MODELS.items():
        assert rsum("selhn", f"{row}-semi-hard-shn") > max(sums[model, "SelHN"])
        assert above[model, "semi-hard-shn"] > above[model, "all-negatives"] > above[model, "contrastive-sct"]
    every = rsum("selhn", "vse-fc-all-negatives")
    assert [f"{-above['VSE (FC)', 'all-negatives']:.0f}", f"{sums['VSE (FC)', 'SelHN'][0] - every:.0f}"] == ["12", "24"]
    assert [one < every for one in sums["VSE (FC)", "SelHN"]] == [False, True, False]
    others = [f"{above[model, 'all-negatives']:.0f}" for model in ("VSE (MLP)", "RVSE (MLP)")]
    assert f"on VSE (MLP) and RVSE (MLP) all negatives are above, by {' and '.join(others)}." in said
    for row in MODELS.values():
        scores = result("selhn", f"{row}-contrastive-sct")["scores"]
        assert scores["width"] * (scores["first"] + len(scores["negative"]) - 1) == pytest.approx(-1, abs=0.021)


def shares(row: str, seed: int) -> list[float]:
    curves = result("selhn", row, seed)["curves"]["train"]
    return [50 * sum(pair) for pair in zip(curves["i2t_hardest_share"], curves["t2i_hardest_share"], strict=True)]


def test_selhn_says_which_negatives_are_taken() -> None:
    found = [shares(f"{row}-selhn", seed) for row in MODELS.values() for seed in SEEDS]
    ends = [statistics.mean(one[-5:]) for one in found]
    lowest = [10 * (one.index(min(one)) + 1) for one in found]
    assert [f"{f(min(one) for one in found):.0f}" for f in (min, max)] == ["23", "38"]
    assert (min(lowest), max(lowest)) == (50, 130)
    assert [f"{f(ends):.0f}" for f in (min, max)] == ["84", "91"]
    said = text_of("results/selhn.md")
    assert "23 to 38 percent where they are fewest (step 50 to 130), and 84 to 91 percent" in said


def test_the_page_of_losses_says_what_its_figure_shows() -> None:
    one = shares("rvse-mlp-selhn", 0)
    rows = (*LOSSES.values(), "all-negatives")
    hardest, selective, every = (result("selhn", f"rvse-mlp-{row}")["validation"]["rsum"] for row in rows)
    said = text_of("losses.md")
    assert f"{min(one):.0f} percent of the anchors around step {10 * (one.index(min(one)) + 1)}, and of" in said
    assert f"of {statistics.mean(one[-5:]):.0f} percent at the end" in said
    assert f"a sum of {hardest:.0f} on dev" in said
    assert f"{selective:.0f} on dev, and {every:.0f} with all negatives" in said


def test_selhn_says_where_gradients_vanish() -> None:
    texts = []
    for loss in LOSSES.values():
        scan, bfan, sgraf = (
            [median("selhn-models", f"{row}-{loss}", seed, "image_grad_norm", 151, 195) for seed in seeds]
            for row, seeds in (("scan", SEEDS), ("bfan", (0,)), ("sgraf", (0,)))
        )
        texts.append((min(scan), max(scan), *bfan, *sgraf))
    hardest, selective = texts
    said = text_of("results/selhn.md")
    assert "{:.2f} to {:.2f} in SCAN, {:.2f} in BFAN and {:.3f} in SGRAF".format(*hardest) in said
    assert "with SelHN {:.1f} to {:.1f}, {:.1f} and {:.1f}.".format(*selective) in said


def test_dbl_says_what_boosting_brings() -> None:
    said = text_of("results/dbl.md")
    base = [rsum("dbl", "baseline", seed) for seed in SEEDS]
    lost = [f"{one - rsum('dbl', 'am-mss', seed):.1f}" for seed, one in enumerate(base)]
    assert "AM loses {}, {} and {} to the baseline".format(*lost) in said
    distances = [
        [result("dbl", row, seed)["test"]["mean_distance"] for row in ("baseline", "am-mss")] for seed in SEEDS
    ]
    assert "(by {:.2f}, {:.2f} and {:.2f})".format(*(one - other for one, other in distances)) in said
    online = [base[0] - rsum("dbl", f"{row}-oss") for row in ("rm", "am", "rs", "as", "rs-and-as")]
    assert "RM {:.1f}, AM {:.1f}, RS {:.1f}, AS {:.1f}, the mean of RS and AS {:.1f}.".format(*online) in said
    assert f"The mean of RM and AM gains {rsum('dbl', 'rm-and-am-oss') - base[0]:.1f}," in said
    assert f"RM loses {base[0] - rsum('dbl', 'rm-mss'):.1f}." in said
    assert f"the baseline's seed 0 is {base[2] - base[0]:.0f} to {base[1] - base[0]:.0f} below" in said
    alone, control, rm, am, longer = (
        rsum("dbl", row) for row in ("baseline", "no-boosting-oas", "rm-oas", "am-oas", "baseline-twice-the-epochs")
    )
    assert f"the baseline comes from {alone:.1f} to {control:.1f}; beside it" in said
    assert f"RM comes to {rm:.1f} ({rm - control:+.1f}) and AM to {am:.1f} ({am - control:+.1f})" in said
    assert f"Twice the epochs in one course come to {longer:.1f}:" in said


def test_dbl_says_what_imitation_brings() -> None:
    said, base = text_of("results/dbl.md"), rsum("dbl-imitation", "baseline")
    assert f"takes the baseline's seed 0 from {rsum('dbl', 'baseline'):.1f} to {base:.1f}." in said
    rows = ("dr-oas", "rkd-oas", "am-oas", "no-boosting-oas", "dml-oss", "dino-mss", "dino-inverse-mss", "am-mss")
    *found, control, dml, dino, inverse, am = (rsum("dbl-imitation", row) for row in rows)
    beside = (
        "none gains: DR comes to {:.1f}, RKD to {:.1f} and AM to {:.1f}, and training on without any of them to {:.1f}."
    )
    assert beside.format(*found, control) in said
    assert max(found) < control
    gains = [one - base for one in (dml, dino, inverse, am)]
    assert "all gain on the baseline: DML {:.1f}, DINO {:.1f}, DINO* {:.1f} and AM {:.1f}.".format(*gains) in said
    seeds = [rsum("dbl", "baseline", seed) for seed in SEEDS]
    assert f"Three seeds of the baseline lie {max(seeds) - min(seeds):.1f} apart in the table above" in said
    assert rsum("dbl", "am-mss") < seeds[0]
    assert gains[0] > max(seeds) - min(seeds) > max(gains[1:]) > min(gains) > 0


def test_dbl_says_what_soft_margins_do() -> None:
    fixed, soft = (result("dbl", row) for row in ("rm-oss", "rm-soft-oss"))
    assert (fixed["weights"], fixed["test"]) == (soft["weights"], soft["test"])
    scores = fixed["scores"]
    highest = max(place for place, count in enumerate(scores["positive"]) if count)
    lowest = min(place for place, count in enumerate(scores["negative"]) if count)
    # Scores lie within half a bin of its middle.
    furthest = scores["width"] * (highest - lowest + 1)
    assert f"no positive of RM scores more than {furthest:.2f} above a negative" in text_of("results/dbl.md")
    other = rsum("dbl", "am-soft-oss") - rsum("dbl", "am-oss")
    assert f"that moves the sum by {abs(other):.1f}" in text_of("results/dbl.md")


def test_addr_says_what_its_regularisation_brings() -> None:
    sums = {
        (host, addr): [rsum("addr", f"{host}-{addr}", seed) for seed in SEEDS]
        for host in ("scan", "bfan", "vsrn")
        for addr in ("base", "full")
    }
    mean = {key: statistics.mean(values) for key, values in sums.items()}
    gains = {host: mean[host, "full"] - mean[host, "base"] for host in ("scan", "bfan", "vsrn")}
    scan, bfan, vsrn = gains.values()
    said = text_of("results/addr.md")
    assert f"Full gains {scan:.0f} on SCAN and {bfan:.0f} on BFAN and loses {-vsrn:.0f} on VSRN," in said
    spreads = {key: statistics.stdev(values) for key, values in sums.items()}
    assert f"of one row spread by {min(spreads.values()):.0f} to {max(spreads.values()):.0f};" in said
    assert all(abs(gain) < spreads[host, "base"] for host, gain in gains.items())
    hardest = [f"scan-{addr}-hardest-negatives-from-the-second-pass-on" for addr in ("full", "base")]
    gaps = [result("addr", row)["curves"]["train"]["hardest_gap"][-1] for row in (hardest[0], "scan-full")]
    assert f"SCAN beside discriminators comes to {rsum('addr', hardest[0]):.1f}, and at the end" in said
    assert f"within {gaps[0]:.3f} of their positives ({gaps[1]:.3f} with all negatives);" in said
    assert f"without discriminators it comes to {rsum('addr', hardest[1]):.1f}." in said


def test_fdf_says_what_conversions_bring() -> None:
    said = text_of("results/fdf.md")
    host = [rsum("fdf", "chan", seed) for seed in range(4)]
    full = [rsum("fdf", "n-2-fc-rts-rw-fdf", seed) for seed in SEEDS]
    means = f"{statistics.mean(full):.1f} in the mean of three seeds, and CHAN {statistics.mean(host):.1f}"
    assert f"{means} in the mean of four" in said
    parts = [rsum("fdf", row) for row in ("n-2-fc", "n-2-fc-rts")]
    table = "(FC) come to {:.1f}, with realignment (RTS) to {:.1f}, with weights (RW) to {:.1f}; CHAN to {:.1f}."
    assert table.format(*parts, full[0], host[0]) in said
    counts = [rsum("fdf", "fdf-n-1"), full[0], rsum("fdf", "fdf-n-4"), rsum("fdf", "fdf-n-8")]
    assert "{:.1f}, {:.1f}, {:.1f} and {:.1f} with one, two, four and eight".format(*counts) in said
    together = [
        json.loads((RESULTS / "fdf" / f"chan-mean-scores-of-{name}.json").read_text())["test"]["rsum"]
        for name in ("two", "four")
    ]
    assert "{:.1f} with the mean scores of two models of CHAN and {:.1f} with four".format(*together) in said
    forms = [rsum("fdf", f"n-2-{name}-in-place-of-ffn") for name in ("adapter", "none")]
    above = "adapter comes to {:.1f}, none to {:.1f}, the paper's feed-forward network to {:.1f}"
    assert above.format(*forms, full[0]) in said
    kept = rsum("fdf", "fdf-other-batches-kept")
    assert f"come to {kept:.1f}, {full[0] - kept:.1f} below those encoded anew" in said
    spreads = f"spread by {statistics.stdev(host):.1f} and {statistics.stdev(full):.1f}"
    assert spreads in said
    # None, adapter, feed-forward network: the order of the paper, all within the spread.
    chance = max(statistics.stdev(host), statistics.stdev(full))
    assert full[0] > forms[0] > forms[1] > full[0] - chance
    assert min(parts[0], counts[0]) > host[0] - chance
    assert counts[0] > counts[1] > max(counts[2:])
    chosen = [result("fdf", row)["best_step"] for row in FDF_ROWS]
    chosen += [result("fdf", row, seed)["best_step"] for row in ("chan", "n-2-fc-rts-rw-fdf") for seed in (1, 2)]
    chosen.append(result("fdf", "chan", 3)["best_step"])
    assert f"after {min(chosen)} to {max(chosen)} of the 780 steps" in said
    seen = [
        [result("fdf", row, seed)["validation"]["rsum"] for seed in range(seeds)]
        for row, seeds in (("chan", 4), ("n-2-fc-rts-rw-fdf", 3))
    ]
    bounds = [f"{min(one):.1f} to {max(one):.1f}" for one in seen]
    assert "CHAN comes to {} and FDF to {}.".format(*bounds) in said
    hosts, twos, (eight,), (one,) = (
        [statistics.mean(result("fdf", row, seed)["curves"]["train"]["loss"][-10:]) / terms for seed in range(seeds)]
        for row, terms, seeds in (
            ("chan", 1, 4),
            ("n-2-fc-rts-rw-fdf", 2.5, 3),
            ("fdf-n-8", 8.5, 1),
            ("fdf-n-1", 1.5, 1),
        )
    )
    assert f"is {min(hosts):.1f} to {max(hosts):.1f} in the four runs of CHAN" in said
    assert f"{min(twos):.1f} to {max(twos):.1f} in the three of FDF, and {eight:.1f} with eight" in said
    assert f"with one it is {one:.1f}." in said


def test_fdf_says_what_its_realignment_experiment_shows() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "realignment.json").read_text())["rsum"]
    said = text_of("results/fdf.md")
    first, second, realigned = (found["BERT"][name] for name in ("model 1", "model 2", "realigned"))
    crossed = sorted([first["model 2"], second["model 1"]])
    assert "do not know each other (sums of {:.0f} to {:.0f}, which is chance)".format(*crossed) in said
    assert f'its own sum of {realigned["realigned"]:.1f} beside the {second["model 2"]:.1f} of "model 2"' in said
    assert min(second["realigned"], realigned["model 2"]) > 20 * crossed[1]
    gru = found["GRU"]
    assert max(gru["realigned"]["model 2"], gru["model 2"]["realigned"]) < 5 < 480 < gru["realigned"]["model 1"]
