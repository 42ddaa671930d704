"""Draws the figures of README and docs from committed results: ``make figures``. Nothing in docs/figures is drawn by hand.

Every figure carries the sha256 of what it was made from, so that ``--check`` (and a test) can tell when it is out of date:

    python tools/figures.py            draw what is missing or out of date (--all: everything)
    python tools/figures.py --check    exit 1 and name what is missing or out of date

A result ``benchmarks/results/NAME.json`` becomes ``docs/figures/NAME-*.svg``. ``schedule-*.svg`` come from the planner.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from leanmla.bench.results import read_json  # noqa: E402
from leanmla.errors import LeanMLAError  # noqa: E402
from leanmla.plots.files import save, sha256, sources_of  # noqa: E402
from leanmla.plots.runs import SCHEMAS, load_run  # noqa: E402
from leanmla.split_plan import SplitPlan, plan_splits  # noqa: E402

RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"


def _ragged() -> list[int]:
    """256 lengths between 1 and 8000, the same every time."""
    return [(i * 7919) % 8000 + 1 for i in range(256)]


#: name -> (keys of the sequences, workers, second line of the title)
SCHEDULES: dict[str, tuple[list[int], int, str]] = {
    "small": ([3000, 1000, 700, 64], 12, "4 sequences on 12 workers, balanced splits"),
    "ragged": (_ragged(), 264, "256 sequences of 1 to 8000 keys on 264 workers, balanced splits"),
}


def schedule(name: str) -> SplitPlan:
    """The plan that a schedule's figure shows."""
    kv_lens, workers, _ = SCHEDULES[name]
    return plan_splits(kv_lens, num_workers=workers)


def _schedule_source(name: str) -> dict[str, str]:
    return {f"schedule {name}": sha256(repr((schedule(name), SCHEDULES[name])).encode())}


def _draw_schedule(name: str, folder: Path) -> None:
    from leanmla.plots.timeline import plot_timeline

    plot_timeline(schedule(name), folder / f"schedule-{name}.svg", subject=SCHEDULES[name][2], sources=_schedule_source(name))


def _draw_result(path: Path, folder: Path) -> None:
    source = {path.name: sha256(path.read_bytes())}
    for old in folder.glob(f"{path.stem}-*.svg"):
        if list(sources_of(old)) == [path.name]:
            old.unlink()  # this result may no longer give that figure
    found = read_json(path)
    if str(found["schema"]).startswith("leanmla-accuracy/"):
        from leanmla.plots.accuracy_plot import accuracy_figure

        save(accuracy_figure(found["results"], budget=found.get("budget")), folder / f"{path.stem}-error.svg", source)
    else:
        from leanmla.plots.bench_plots import save_bench_figures

        save_bench_figures(load_run(path), folder, prefix=f"{path.stem}-", sources=source)


def _drawable(path: Path) -> bool:
    schema = str(read_json(path)["schema"])
    return schema.startswith(("leanmla-accuracy/", *SCHEMAS))


def problems(results: Path = RESULTS, figures: Path = FIGURES) -> dict[str, Callable[[], None]]:
    """What is missing or out of date, as a sentence, and what draws it anew. Empty when all is well."""
    made = {p: sources_of(p) for p in sorted(figures.glob("*.svg"))} if figures.is_dir() else {}
    found: dict[str, Callable[[], None]] = {}
    known: dict[str, str] = {}
    for path in sorted(results.glob("*.json")):
        if not _drawable(path):
            continue
        known[path.name] = sha256(path.read_bytes())
        mine = [p.name for p, sources in made.items() if path.name in sources]
        old = [p.name for p, sources in made.items() if sources.get(path.name, known[path.name]) != known[path.name]]
        draw = lambda path=path: _draw_result(path, figures)  # noqa: E731
        if not mine:
            found[f"{path.name} has no figure"] = draw
        elif old:
            found[f"{path.name} has changed since {', '.join(old)}"] = draw
    for name in SCHEDULES:
        source = _schedule_source(name)
        known.update(source)
        if made.get(figures / f"schedule-{name}.svg") != source:
            found[f"schedule-{name}.svg is missing or shows another plan"] = lambda name=name: _draw_schedule(name, figures)
    for path, sources in made.items():
        if not sources or any(s not in known for s in sources):
            from_what = ", ".join(s for s in sources if s not in known) or "nothing"
            found[f"{path.name} is made from {from_what}, which is not there"] = path.unlink
    return found


def main(argv: list[str] | None = None) -> int:
    """Draw or check."""
    parser = argparse.ArgumentParser(prog="python tools/figures.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say what is missing or out of date")
    parser.add_argument("--all", action="store_true", help="draw everything anew")
    args = parser.parse_args(argv)
    try:
        if args.all and not args.check and FIGURES.is_dir():
            for path in FIGURES.glob("*.svg"):
                path.unlink()
        found = problems()
        if args.check:
            for words in found:
                print(f"figures: {words}", file=sys.stderr)
            if found:
                print("figures: run make figures", file=sys.stderr)
            return 1 if found else 0
        FIGURES.mkdir(parents=True, exist_ok=True)
        for words, draw in found.items():
            print(words)
            draw()
    except LeanMLAError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    print(f"{len(list(FIGURES.glob('*.svg')))} figures in docs/figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
