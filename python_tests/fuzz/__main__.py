"""Run random attacks for some minutes: `python -m python_tests.fuzz --minutes 10`.

Each finding prints the command that repeats it. The exit status is 1 if there are findings.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from python_tests.fuzz import files, kills, operators
from python_tests.helpers.processes import ROOT

KINDS = ("operators", "files", "kills")
# The order of kinds: cases of different kinds take different times, so their counts differ.
ORDER = ("operators",) * 20 + ("files",) * 10 + ("kills",)
VARIABLE = "ITM_FAST_CPU_ISA"


class Operators:
    """One process per instruction set, since loading the library chooses the instruction set."""

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}
        with self._pool("") as pool:
            self.names: list[str] = pool.submit(operators.instruction_sets).result()

    def _pool(self, name: str) -> ProcessPoolExecutor:
        before = os.environ.pop(VARIABLE, None)
        if name:
            os.environ[VARIABLE] = name
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # Starts the process now, with this environment.
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
        return pool

    def run_case(self, seed: int, number: int) -> str:
        name = self.names[number % len(self.names)]
        pool = self._pools.get(name) or self._pools.setdefault(name, self._pool(name))
        try:
            return f"{name}: {pool.submit(operators.run_case, seed, number).result()}"
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        except BrokenProcessPool:
            del self._pools[name]
            raise AssertionError(f"{name}: the process ended") from None

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


@contextlib.contextmanager
def attacks(only: str | None) -> Iterator[dict[str, Callable[[int, int], str]]]:
    """Yield the function of each kind that runs a case from a seed and a number."""
    folder = Path(tempfile.mkdtemp(prefix="itm_fast_fuzz_"))
    of_sets = Operators() if only in (None, "operators") else None
    try:
        base = files.make_base(folder / "base") if only != "operators" else folder
        yield {
            **({"operators": of_sets.run_case} if of_sets else {}),
            "files": lambda seed, number: files.run_case(seed, number, base, folder / "case"),
            "kills": lambda seed, number: kills.run_case(seed, number, base, folder / "case"),
        }
    finally:
        if of_sets:
            of_sets.close()
        shutil.rmtree(folder)


def attack(
    seed: int, only: str | None, numbers: Iterator[int], until: Callable[[int], bool]
) -> tuple[Counter[str], list[str]]:
    """Run cases until `until(done)`, print findings when they occur, and return the counts and the findings."""
    counts, findings, next_of = Counter[str](), list[str](), dict.fromkeys(KINDS, 0)
    order = (only,) if only else ORDER
    with attacks(only) as run, tqdm(unit="case") as bar:
        for done, number in enumerate(numbers):
            if until(done):
                break
            kind = order[done % len(order)]
            case = number if only else next_of[kind]
            next_of[kind] += 1
            try:
                run[kind](seed, case)
            except AssertionError as error:
                repeat = f"python -m python_tests.fuzz --seed {seed} --only {kind} --case {case}"
                findings.append(f"{kind} {case}: {error}\n  repeat: {repeat}")
                bar.write(findings[-1])
            counts[kind] += 1
            bar.update()
            bar.set_postfix(findings=len(findings), refresh=False)
    return counts, findings


def main(
    minutes: Annotated[float, typer.Option(help="Run for this time.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Seed of all cases; default: a random one.")] = None,
    only: Annotated[str | None, typer.Option(help="One kind: operators, files or kills.")] = None,
    case: Annotated[int | None, typer.Option(help="Run this case of --only, and no other.")] = None,
    cases: Annotated[int | None, typer.Option(help="Stop after this number of cases.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the counts and findings to this file.")] = None,
) -> None:
    """Attack operators, files and interrupted runs with random cases."""
    if only not in (None, *KINDS):
        raise typer.BadParameter(f"expected {', '.join(KINDS)}, got {only}", param_hint="--only")
    if case is not None and only is None:
        raise typer.BadParameter("needs --only", param_hint="--case")
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    started = time.monotonic()
    numbers = iter([case]) if case is not None else iter(range(2**31))

    def until(done: int) -> bool:
        return done >= cases if cases is not None else case is None and time.monotonic() - started > 60 * minutes

    counts, findings = attack(seed, only, numbers, until)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    record = {
        "seed": seed,
        "cases": {kind: counts[kind] for kind in KINDS if counts[kind]},
        "findings": findings,
        "seconds": round(time.monotonic() - started),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "commit": commit.stdout.strip(),
    }
    if out is not None:
        out.write_text(json.dumps(record, indent=2) + "\n")
    for kind, count in record["cases"].items():
        typer.echo(f"{kind:10} {count:8,} cases")
    typer.echo(f"seed {seed}, {record['seconds']} s, {len(findings)} findings")
    raise typer.Exit(int(bool(findings)))


if __name__ == "__main__":
    typer.run(main)
