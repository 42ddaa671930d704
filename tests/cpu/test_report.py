"""The HTML report: complete in itself, right about differences, readable in a browser."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from _fixture_runs import bench_run, environment, with_failures, write_run

from leanmla.accuracy import DISTRIBUTIONS, measure_accuracy, recommend
from leanmla.bench.results import write_json
from leanmla.cli import main
from leanmla.errors import InvalidArgument
from leanmla.plots.runs import run_of
from leanmla.report import compare_runs, make_report

HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


class Page(HTMLParser):
    """Tags that are opened and closed, what is fetched, ids, links and text."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.sources, self.ids, self.anchors, self.words, self.alts = [], [], [], [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.sources += [v for k, v in attrs if k == "src" or (k == "href" and not v.startswith("#"))]
        self.anchors += [v[1:] for k, v in attrs if k == "href" and v.startswith("#")]
        self.ids += [found["id"]] if "id" in found else []
        self.alts += [found.get("alt")] if tag == "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def changed_run():
    """A run that is 3 % faster, but 6 % slower for one contender, with a newer torch."""
    run = bench_run(factor=0.97)
    for r in run.results:
        if r.contender == "auto mxfp4":
            r.time_us *= 1.09
    run.environment["packages"]["torch"] = "2.14.0"
    return run


@pytest.fixture
def results(tmp_path):
    write_json(tmp_path / "before.json", with_failures(bench_run()).document())
    write_json(tmp_path / "after.json", changed_run().document())
    found = measure_accuracy(["normal"], [64])
    choice = recommend(found, 0.5)
    write_json(tmp_path / "accuracy.json", {
        "schema": "leanmla-accuracy/1", "command": "leanmla accuracy", "environment": environment("cpu"), "budget": 0.5,
        "recommendation": choice.document(), "distributions": {"normal": DISTRIBUTIONS["normal"].words},
        "results": [r.document() for r in found],
    })  # fmt: skip
    return [tmp_path / f"{n}.json" for n in ("before", "after", "accuracy")]


@pytest.fixture
def no_matplotlib(monkeypatch):
    """As if it were not installed (also: rendering takes seconds)."""
    from leanmla.plots import files

    real = importlib.util.find_spec
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))


def test_the_page_is_whole_and_fetches_nothing(results):
    report = make_report(results, title="a <title> & more")
    page = Page(report.html)
    assert report.html.startswith("<!doctype html>") and "<title>a &lt;title&gt; &amp; more</title>" in report.html
    assert all(s.startswith("data:image/svg+xml;base64,") for s in page.sources)
    assert "default-src 'none'" in html.unescape(report.html) and "@import" not in report.html and "url(" not in report.html
    assert len(page.ids) == len(set(page.ids)) and set(page.anchors) <= set(page.ids)
    for words in ("Example GPU", "leanmla bench --cases contest <made up>", "reading 4 TB/s", "multiplying 700 TFLOP/s", "packages.torch",
                  "out[0, 0, 0] = <1>, expected 2 & more", "takes pages of 64 only", "a kernel is wrong", "median of the samples",
                  "Smallest format within 0.5"):  # fmt: skip
        assert words in page.text, words
    if HAVE_MATPLOTLIB:
        assert report.num_pictures == len(page.alts) == 12 and all(len(a) > 20 for a in page.alts)


def test_differences_beyond_the_spread_are_flagged_and_only_those():
    before, after = run_of(bench_run().document(), "before"), run_of(changed_run().document(), "after")
    found = compare_runs(before, after)
    verdicts = {d.by: {e.verdict for e in found.differences if e.by == d.by} for d in found.differences}
    assert verdicts == {"hopper bf16": {"faster"}, "hopper fp8": {"faster"}, "hopper mxfp4": {"slower"}, "flash_mla bf16": {"faster"},
                        "flashinfer fa3 fp8": {"faster"}}  # fmt: skip
    assert found.ratios()["hopper mxfp4"] == pytest.approx(0.97 * 1.09)
    assert ("packages.torch", "2.13.0", "2.14.0") in found.environment
    assert "of 40 times 32 are faster, 8 slower, 0 the same" in found.sentence()
    # The same change between noisy runs is no difference.
    noisy = compare_runs(run_of(bench_run(spread=0.04).document(), "a"), run_of(changed_run().document(), "b"))
    assert {d.verdict for d in noisy.differences if d.by != "hopper mxfp4"} == {"same"}
    assert compare_runs(before, before).count("same") == 40


def test_what_only_one_run_has_is_named():
    short = bench_run()
    short.results = [r for r in short.results if r.contender != "auto fp8"]
    found = compare_runs(run_of(bench_run().document(), "a"), run_of(short.document(), "b"))
    assert len(found.only_before) == 8 and "4 x 1024, hopper fp8" in found.only_before and not found.only_after
    other = bench_run()
    for r in other.results:
        r.backend = "triton" if r.backend else ""
    found = compare_runs(run_of(bench_run().document(), "a"), run_of(other.document(), "b"))
    assert any(d.by == "hopper bf16 → triton bf16" for d in found.differences)


def test_results_of_other_versions_and_parts_of_results_are_one_sentence(tmp_path, no_matplotlib, capsys):
    whole = bench_run().document()
    bare = {k: v for k, v in whole.items() if k != "environment"}
    environment = {"device": {"name": "x", "kind": "cpu"}}
    accuracy = {"schema": "leanmla-accuracy/1", "environment": environment}
    for document, words in (
        ({**whole, "schema": "leanmla-bench/0"}, "was written in version 0 of leanmla-bench, this reads version 1"),
        ({**whole, "schema": "leanmla-run/2"}, "was written in version 2 of leanmla-run"),
        (bare, "it has no environment.device.name"),
        ({**whole, "results": None}, "it has no results"),
        ({"schema": "leanmla-accuracy/1", "results": []}, "it has no environment.device.name"),
        ({**accuracy, "results": []}, "has no results"),
        ({**accuracy, "results": [{"label": "fp8"}]}, "is not a whole result of leanmla accuracy"),
    ):
        write_json(tmp_path / "a.json", document)
        assert main(["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "r.html")]) == 2, words
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "r.html")]) == 2
    assert "none.json: cannot be read as a result file (No such file or directory)" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_page_names_what_only_one_run_has_once_a_contender(tmp_path, no_matplotlib):
    short = bench_run().document()
    short["results"] = [r for r in short["results"] if r["contender"] != "auto fp8"]
    short["started"] = "2026-11-30T14:03:59+00:00"
    write_json(tmp_path / "b.json", short)
    page = make_report([write_run(tmp_path / "a.json"), tmp_path / "b.json"]).html
    assert "Only in a: hopper fp8 (4 x 1024, 4 x 8192, 32 x 1024," in page and page.count("Only in a") == 1
    assert ">2026-11-30 14:03<" in page and "2026-11-30T14" not in page


def test_files_of_the_same_name_get_labels_of_their_own(tmp_path, no_matplotlib):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_run(tmp_path / folder / "run.json")
    report = make_report([tmp_path / "x" / "run.json", tmp_path / "y" / "run.json", tmp_path / "x" / "run.json"])
    assert [c.after for c in report.comparisons] == ["y/run", "x/run (2)"] and report.comparisons[0].before == "x/run (1)"
    page = Page(report.html)
    assert len(page.ids) == len(set(page.ids))


def test_a_run_on_a_cpu_speaks_of_milliseconds(tmp_path, no_matplotlib):
    page = Page(make_report([write_run(tmp_path / "cpu.json", kind="cpu")]).html)
    assert "GB/s" in page.text and "ms" in page.words and "fp32" in page.text


def test_without_matplotlib_there_are_tables_and_one_sentence(results, no_matplotlib):
    report = make_report(results)
    page = Page(report.html)
    assert report.num_pictures == 0 and not page.alts and "leanmla[plot]" in report.note and "Without pictures" in page.text
    assert page.text.count("hopper fp8") > 10


def test_a_noisy_run_is_called_so(tmp_path, no_matplotlib):
    assert "These times are noisy" in make_report([write_run(tmp_path / "a.json", spread=0.08)]).html
    assert "noisy" not in make_report([write_run(tmp_path / "b.json", spread=0.02)]).html


def test_command(capsys, tmp_path, results, no_matplotlib):
    target, numbers = tmp_path / "r.html", tmp_path / "r.json"
    argv = ["report", *map(str, results), "-o", str(target)]
    assert main([*argv, "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "slower" in out and "needs no network" in out
    document = json.loads(numbers.read_text())
    assert document["schema"] == "leanmla-report/1" and len(document["comparisons"]) == 1
    assert {d["verdict"] for d in document["comparisons"][0]["differences"]} == {"faster", "slower"}
    assert main([*argv, "--quiet"]) == 0 and capsys.readouterr().out == ""


def test_refusals(capsys, tmp_path):
    assert main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "r.html")]) == 2
    assert "cannot be read as a result file" in capsys.readouterr().err
    (tmp_path / "info.json").write_text('{"schema": "leanmla-info/1"}')
    assert main(["report", str(tmp_path / "info.json"), "-o", str(tmp_path / "r.html")]) == 2
    assert "expected a result of leanmla bench, run or accuracy" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "info.json"), "-o", str(tmp_path / "r.png")]) == 2
    assert "ends in .html" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(InvalidArgument, match="at least one file"):
        make_report([])


@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium to look at the page with")
@pytest.mark.skipif(not HAVE_MATPLOTLIB, reason="needs matplotlib: pip install 'leanmla[plot]'")
def test_a_browser_shows_tables_and_pictures(tmp_path, results):
    from matplotlib.image import imread

    page, shot = tmp_path / "r.html", tmp_path / "shot.png"
    page.write_text(make_report(results[1:2]).html)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
               "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars",
               "--window-size=1200,1600", f"--screenshot={shot}", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert shot.exists(), done.stderr[-500:]
    pixels = imread(shot)[..., :3]
    assert pixels.shape == (1600, 1200, 3)
    ink = (pixels < 0.5).all(-1)
    assert 0.005 < ink.mean() < 0.3
    # The first picture: the colours of our formats are on the screen.
    for colour in ("1d2f6f", "c8501e", "1e9e82"):
        want = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        assert (abs(pixels - want).max(-1) < 0.02).sum() > 100, colour
    assert not re.search(r"(?i)refused to|failed to load", done.stderr)


def test_goals_are_a_table_of_pass_and_miss(tmp_path, no_matplotlib):
    document = bench_run().document()
    one = {"table": "Tuned", "row": "4 x 1024", "column": "fp8", "case": "4 x 1024", "formats": ["fp8"]}
    document["goals"] = [
        {**one, "time_us": 9.0, "limit_us": 10.0, "met": True},
        {**one, "column": "bf16", "time_us": 12.0, "limit_us": 10.0, "met": False},
        {**one, "table": "", "row": "a mean", "column": "", "case": "", "time_us": None, "limit_us": 62.0, "met": None},
    ]
    write_json(tmp_path / "a.json", document)
    page = make_report([tmp_path / "a.json"]).html
    assert "Goals: 1 met, 1 missed, 1 not timed in this run." in page
    assert re.search(
        r'fp8</td><td class="n">9.000</td><td class="n">10.00</td><td class="n">0.90</td><td class="faster">pass', page
    )
    assert 'slower">miss' in page and "a mean (contest grid)" in page and 'muted">not timed' in page
    assert ">Goals<" not in make_report([write_run(tmp_path / "b.json")]).html


def test_a_format_of_a_later_version_is_one_sentence(tmp_path, no_matplotlib):
    document = bench_run().document()
    document["results"][0]["format"] = "int2"
    write_json(tmp_path / "a.json", document)
    with pytest.raises(InvalidArgument, match="cache format 'int2', which this version does not know"):
        make_report([tmp_path / "a.json"])


def test_the_same_refusal_is_said_once(tmp_path, no_matplotlib):
    document = bench_run().document()
    for r in document["results"]:
        if r["contender"] == "auto mxfp4":
            r.update(status="refused", message="has no kernel", time_us=None, tb_s=None)
    write_json(tmp_path / "a.json", document)
    page = make_report([tmp_path / "a.json"]).html
    assert page.count("has no kernel") == 1 and "refused: 8 cases, hopper mxfp4: has no kernel" in page
