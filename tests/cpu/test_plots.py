"""Pictures: that they are drawn from the right numbers, fit, can be told apart, and know what they were made from."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from _fixture_runs import CONTENDERS, MATMUL_TFLOP_S, READ_TB_S, bench_run, with_failures, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from leanmla.bench.cases import BenchCase, cases_named
from leanmla.bench.ceilings import Ceilings
from leanmla.bench.results import read_json, write_json
from leanmla.cli import main
from leanmla.errors import InvalidArgument
from leanmla.files import write_whole
from leanmla.plots import files
from leanmla.plots.files import PlottingUnavailable, check_target, render, save, sources_of
from leanmla.plots.runs import digits, load_run, run_of, short_count, speedups
from leanmla.plots.schedule import timetable
from leanmla.split_plan import plan_splits

ROOT = Path(__file__).resolve().parents[2]
HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not HAVE_MATPLOTLIB, reason="needs matplotlib: pip install 'leanmla[plot]'")
if HAVE_MATPLOTLIB:
    from leanmla.plots.bench_plots import bench_figures, geomean_figure, save_bench_figures, speedup_figure, sweep_figure
    from leanmla.plots.roofline import roofline_figure
    from leanmla.plots.series import looks_of
    from leanmla.plots.style import draw, look_of_format
    from leanmla.plots.timeline import plot_timeline, timeline_figure


def figures_script():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_fits(figure) -> None:
    """Nothing that was written runs out of the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    texts = [
        figure._suptitle,
        *figure.texts,
        *(t for axes in figure.axes for t in (axes.xaxis.label, axes.yaxis.label, axes.title)),
    ]
    for text in texts:
        if text is not None and text.get_text().strip() and text.get_visible():
            box = text.get_window_extent()
            assert box.x0 >= -2 and box.x1 <= width + 2 and box.y0 >= -2 and box.y1 <= height + 2, (
                text.get_text(),
                box,
                width,
                height,
            )


# -- schedules ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=30),
    st.integers(1, 40),
    st.sampled_from([{}, {"num_kv_splits": 3}, {"split_size": 200}]),
)
def test_timetable_shows_all_work_once(kv_lens, workers, mode):
    plan = plan_splits(kv_lens, num_workers=workers, **mode)
    table = timetable(plan)
    f = table.figures
    by_row: dict[int, list] = {}
    for bar in table.bars:
        by_row.setdefault(bar.worker, []).append(bar)
    for bars in by_row.values():  # back to back, no overlap
        ends = [0, *(b.end for b in bars)]
        assert [b.start for b in bars] == ends[:-1]
    assert sorted((b.item.seq, b.item.split) for b in table.bars) == [(i.seq, i.split) for i in plan.items if i.num_keys]
    assert list(table.loads) == sorted(table.loads, reverse=True) and len(table.loads) == workers
    assert f.makespan == max(table.loads)
    assert not any(kv_lens) or f.idle_share == pytest.approx(1 - plan.balance, abs=1e-9)
    assert f.partials == sum(n for n in plan.splits_per_seq if n > 1)
    combined = [b.item.seq for b in table.bars if b.ends_sequence]
    assert len(combined) == len(set(combined)) and all(plan.splits_per_seq[s] > 1 for s in combined)
    assert all(len(words) < 88 for words in f.sentences())


def test_figures_of_a_hand_made_schedule():
    f = timetable(plan_splits([128, 64, 64], num_workers=2, num_kv_splits=1)).figures
    assert (f.makespan, f.mean_load, f.idle_share, f.idle_workers, f.imbalance) == (2, 2.0, 0.0, 0, 1.0)
    f = timetable(plan_splits([256, 64], num_workers=4, num_kv_splits=1)).figures
    assert (f.makespan, f.mean_load, f.idle_workers, f.split_sequences) == (4, 1.25, 2, 0)
    assert f.idle_share == pytest.approx(1 - 1.25 / 4) and "nothing to combine" in f.sentences()[1]


@needs_matplotlib
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_timeline_is_written_whole_and_the_same_every_time(tmp_path, suffix):
    plan = plan_splits([1000, 700, 64, 3000], num_workers=12)
    path = tmp_path / f"a{suffix}"
    figures = plot_timeline(plan, path, sources={"x.json": "ab" * 32})
    first = path.read_bytes()
    assert figures.num_items == len(plan.items) and len(first) > 5000
    plot_timeline(plan, path, sources={"x.json": "ab" * 32})
    assert path.read_bytes() == first and [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix != ".pdf":
        assert sources_of(path) == {"x.json": "ab" * 32}


@needs_matplotlib
@pytest.mark.parametrize(
    "kv_lens, workers",
    [
        ([(i * 7919) % 8000 + 1 for i in range(256)], 264),
        ([131072, *[1024] * 31], 264),
        ([0, 0], 3),
        ([5], 1),
        ([8192] * 32, 132),
    ],
)
def test_timeline_draws_every_item_and_fits(kv_lens, workers):
    plan = plan_splits(kv_lens, num_workers=workers)
    figure = timeline_figure(plan)
    axes = figure.axes[0]
    drawn = sum(len(c.get_paths()) for c in axes.collections if len(c.get_facecolor()) > 1 or len(plan.items) == 1)
    items = [i for i in plan.items if i.num_keys]
    assert drawn >= len(items) or len({i.seq for i in items}) <= 1
    assert_fits(figure)
    assert "idle" in figure.get_suptitle() or "waits" in figure.get_suptitle() or "No keys" in figure.get_suptitle()


@needs_matplotlib
def test_the_key_explains_names_on_bars_only_where_there_are_any():
    for workers, words in ((12, "sequence; 2.1 on a bar is"), (132, "sequence")):
        axes = timeline_figure(plan_splits([60000, 700], num_workers=workers)).axes[0]
        assert axes.get_legend().get_title().get_text().splitlines()[0] == words
        assert bool(axes.texts) == (workers == 12)


# -- benchmarks --------------------------------------------------------------------------------------------------------


def gpu_run(**options):
    return run_of(bench_run(**options).document(), "gpu")


def test_rows_know_their_operations_and_bytes():
    run = gpu_run()
    row = next(r for r in run.rows if r.case == "32 x 8192" and r.contender == "auto fp8")
    case = BenchCase((8192,) * 32)
    assert row.flops == case.flops and row.tokens == case.tokens and row.by == "hopper fp8"
    assert row.intensity == pytest.approx(case.flops / (case.tokens * 576))
    assert run.read_tb_s == READ_TB_S and run.matmul_tflop_s == MATMUL_TFLOP_S and run.time_unit == ("µs", 1.0)
    assert set(run.geomeans()) == {"hopper bf16", "hopper fp8", "hopper mxfp4", "flash_mla bf16", "flashinfer fa3 fp8"}
    ratio = speedups(run.rows, "flash_mla bf16")["hopper fp8"]["32 x 8192"]
    theirs = next(r for r in run.rows if r.case == "32 x 8192" and r.contender == "flash_mla bf16")
    assert ratio == pytest.approx(theirs.time_us / row.time_us)


def test_short_counts():
    assert [short_count(n) for n in (1, 1000, 1024, 8192, 131072, 1 << 20)] == ["1", "1000", "1k", "8k", "128k", "1M"]


@needs_matplotlib
@pytest.mark.parametrize(
    "options, names",
    [
        ({}, {"sweep-batch", "sweep-kv", "roofline", "speedup", "geomean"}),
        ({"kind": "cpu", "cases": cases_named("small")}, {"sweep-batch", "sweep-kv", "roofline", "speedup"}),
        ({"cases": cases_named("all")}, {"sweep-batch", "sweep-kv", "roofline", "speedup", "geomean"}),
        ({"cases": cases_named("ragged")}, {"roofline", "speedup"}),
        ({"cases": cases_named("2x64"), "contenders": {"auto bf16": CONTENDERS["auto bf16"]}}, {"roofline"}),
    ],
)
def test_a_run_gives_the_pictures_it_has_data_for(options, names):
    found = bench_figures(gpu_run(**options))
    assert set(found) == names
    for figure in found.values():
        assert_fits(figure)


@needs_matplotlib
def test_sweep_draws_the_times_the_bandwidths_and_the_measured_ceiling():
    run = gpu_run()
    figure = sweep_figure(run, "batch")
    kv8k_time, kv8k_rate = figure.axes[1], figure.axes[3]
    assert kv8k_time.get_title(loc="left") == "kv 8k"
    line = next(line for line in kv8k_time.lines if line.get_label() == "hopper fp8")
    want = [r for r in run.rows if r.by == "hopper fp8" and r.kv == 8192]
    assert list(line.get_xdata()) == [4, 32, 64, 256]
    assert list(line.get_ydata()) == pytest.approx([r.time_us for r in sorted(want, key=lambda r: r.batch)])
    assert any(list(line.get_ydata()) == [READ_TB_S] * 2 for line in kv8k_rate.lines)
    assert all(max(line.get_ydata()) <= READ_TB_S for line in kv8k_rate.lines)
    assert "µs" in figure.axes[0].get_ylabel() and "TB/s" in figure.axes[2].get_ylabel()
    assert sweep_figure(gpu_run(cases=cases_named("4x64")), "batch") is None
    with pytest.raises(InvalidArgument, match="against: expected 'batch' or 'kv'"):
        sweep_figure(run, "heads")


@needs_matplotlib
def test_roofline_has_both_measured_ceilings():
    run = gpu_run()
    axes = roofline_figure(run).axes[0]
    roof = axes.lines[0]
    assert max(roof.get_ydata()) == MATMUL_TFLOP_S
    x, y = roof.get_xdata(), roof.get_ydata()
    assert y[0] / x[0] == pytest.approx(READ_TB_S) and x[1] == pytest.approx(MATMUL_TFLOP_S / READ_TB_S)
    points = next(line for line in axes.lines if line.get_label() == "hopper mxfp4")
    assert set(map(round, points.get_xdata())) == {round(2 * 1088 * 16 / 306)}
    assert "Every case is on the memory-bound side" in roofline_figure(run).get_suptitle()
    document = bench_run().document()
    document["ceilings"]["read_tb_s"] = 1000.0
    assert "compute-bound side" in roofline_figure(run_of(document, "x")).get_suptitle()
    del document["ceilings"]
    with pytest.raises(InvalidArgument, match="no measured ceilings"):
        roofline_figure(run_of(document, "x"))


@needs_matplotlib
def test_speedup_and_geomean_say_who_wins():
    run = gpu_run()
    assert re.match(r"hopper mxfp4 is 2\.\d+ times as fast as flash_mla bf16", speedup_figure(run).get_suptitle())
    assert "hopper mxfp4 takes" in geomean_figure(run).get_suptitle()
    assert speedup_figure(gpu_run(contenders={"auto bf16": CONTENDERS["auto bf16"]})) is None


@needs_matplotlib
def test_what_failed_is_left_out_of_pictures():
    document = json.loads(json.dumps(with_failures(bench_run()).document(), default=str))
    run = run_of(document, "x")
    figure = sweep_figure(run, "batch")
    assert all(math.isfinite(y) for axes in figure.axes for line in axes.lines for y in line.get_ydata())
    broken = bench_run()
    for r in broken.results:
        r.status = "failed"
    with pytest.raises(InvalidArgument, match="nothing to draw"):
        bench_figures(run_of(broken.document(), "x"))


@needs_matplotlib
def test_formats_differ_in_grey_in_marker_and_in_dash():
    from matplotlib.colors import to_rgb

    looks = [look_of_format(name) for name in ("bf16", "fp8", "mxfp4", "fp8_tile128", "mxfp4_row320")]

    def luminance(look) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(look.colour)]
        return 116 * (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) ** (1 / 3) - 16

    grey = sorted(luminance(look) for look in looks)
    assert min(b - a for a, b in itertools.pairwise(grey)) > 8
    assert len({look.marker for look in looks}) == len({str(look.dash) for look in looks}) == 5


@needs_matplotlib
def test_backends_differ_by_filling_and_formats_by_marker():
    """Also where the first backend refuses a format: a format without a second backend is not drawn as if it had two."""
    run = bench_run(
        contenders={f"{b} {f}": (f, False, 0.9, 6.0) for f in ("bf16", "fp8", "mxfp4") for b in ("hopper", "triton")}
    )
    for r in run.results:
        r.backend = r.contender.split()[0]
        if r.contender == "hopper mxfp4":
            r.status, r.message, r.backend = "refused", "has no kernel", ""
    looks = looks_of(run_of(run.document(), "x"))
    assert list(looks) == ["hopper bf16", "triton bf16", "hopper fp8", "triton fp8", "triton mxfp4"]
    for by, look in looks.items():
        backend, fmt = by.split()
        assert look.hollow == (backend == "triton")
        assert (look.colour, look.marker) == (look_of_format(fmt).colour, look_of_format(fmt).marker)


@needs_matplotlib
def test_three_backends_of_one_format_look_different():
    run = bench_run(contenders={f"{b} fp8": ("fp8", False, 0.9, 6.0) for b in ("hopper", "triton", "hopper_cuda", "cpu")})
    for r in run.results:
        r.backend = r.contender.split()[0]
    looks = looks_of(run_of(run.document(), "x"))
    assert len({(str(look.dash), look.hollow, look.half) for look in looks.values()}) == 4
    assert [look.hollow + 2 * look.half for look in looks.values()] == [0, 1, 2, 2]
    with draw(3, 3, "") as figure:
        axes = figure.subplots()
        for look in looks.values():
            axes.plot([1, 2], [1, 2], **look.line)
        figure.canvas.draw()


def test_digits_keep_zeros():
    found = [digits(v) for v in (24.3, 1102.4, 9.9996, 0.5, 12345.0, 0.0, math.nan)]
    assert found == ["24.30", "1102", "10.00", "0.5000", "12345", "0", "nan"]
    assert digits(106.2, 3) == "106" and digits(37.6, 3) == "37.6"


def test_documents_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="expected a result of leanmla bench or run"):
        run_of({"schema": "leanmla-info/1"}, "x")
    with pytest.raises(InvalidArgument, match="not a whole result"):
        run_of({"schema": "leanmla-bench/1", "results": [{}]}, "x")
    run = load_run(write_run(tmp_path / "name.json"))
    assert run.label == "name" and len(run.good) == 40


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_missing_matplotlib_is_one_sentence(monkeypatch, capsys, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    with pytest.raises(PlottingUnavailable, match=r"pip install 'leanmla\[plot\]'"):
        files.require_matplotlib()
    for argv in (
        ("explain", "--device", "cpu", "--plot", str(tmp_path / "a.png")),
        ("bench", "--cases", "1x64", "--plot", str(tmp_path / "b")),
        ("accuracy", "--plot", str(tmp_path / "a.svg")),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert "pip install 'leanmla[plot]'" in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_import_hook_that_forbids_matplotlib_counts_as_missing(monkeypatch, capsys, tmp_path):
    def forbid(name, *_):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("leanmla.plots.files.importlib.util.find_spec", forbid)
    assert main(["accuracy", "--plot", str(tmp_path / "a.svg")]) == 2
    assert "pictures need matplotlib" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_bad_targets_are_refused_before_any_work(tmp_path):
    for path, words in (
        (tmp_path / "a.gif", r"ends in \.png, \.svg, \.pdf"),
        (tmp_path / "none" / "a.png", "does not exist"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            check_target(path, "--plot")
    (tmp_path / "dir.png").mkdir()
    with pytest.raises(InvalidArgument, match="is a folder"):
        check_target(tmp_path / "dir.png", "--plot")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, a folder that takes no files from anyone")
def test_a_folder_that_takes_no_files_is_refused_before_any_work(tmp_path, capsys):
    for argv in (("explain", "--device", "cpu", "--plot", "/proc/a.svg"), ("bench", "--device", "cpu", "--cases", "1x64", "--formats", "bf16", "--seconds", "0.01", "--peers", "none", "--plot", "/proc"),
                 ("accuracy", "--plot", "/proc/a.svg"), ("report", "none.json", "-o", "/proc/a.html")):  # fmt: skip
        if HAVE_MATPLOTLIB or argv[0] == "report":
            assert main(argv) == 2
            error = capsys.readouterr().err
            assert "the folder /proc cannot be written to" in error and error.count("\n") == 1


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.html"
    path.write_bytes(b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@needs_matplotlib
def test_drawing_leaves_no_global_state(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    save(timeline_figure(plan_splits([300], num_workers=3)), tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


# -- commands ----------------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_explain_draws_its_schedule_and_gives_the_numbers(capsys, tmp_path):
    picture, numbers = tmp_path / "a.svg", tmp_path / "a.json"
    argv = ("explain", "--kv", "8192", "--batch", "32", "--format", "fp8", "--device-like", "h200")
    assert main((*argv, "--plot", str(picture), "--json", str(numbers))) == 0
    out = capsys.readouterr().out
    assert "of the workers' time is idle" in out and str(picture.name) in out.replace("\n", "")
    found = json.loads(numbers.read_text())["schedule"]
    assert found["timeline"]["idle_share"] == pytest.approx(1 - found["balance"])
    assert picture.read_text().startswith("<?xml")
    assert main((*argv, "--plot", str(picture), "--quiet")) == 0 and capsys.readouterr().out == ""


@needs_matplotlib
def test_bench_draws_into_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("leanmla.bench.data.POOL_TOKENS", 256)
    monkeypatch.setattr("leanmla.bench.runner.measure_ceilings", lambda device: Ceilings(0.02, "given", 0.1, None))
    monkeypatch.setattr("leanmla.bench.measure.copies_needed", lambda case, fmt, device: 1)
    folder = tmp_path / "new" / "pictures"
    argv = (
        "bench",
        "--backend",
        "reference",
        "--cases",
        "1x64,2x64",
        "--seconds",
        "0.01",
        "--formats",
        "bf16",
        "--peers",
        "bmm",
        "--device",
        "cpu",
    )
    assert main((*argv, "--plot", str(folder))) == 0
    assert {p.name for p in folder.iterdir()} == {"sweep-batch.svg", "roofline.svg", "speedup.svg"}
    assert "Drawn" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main((*argv, "--plot", str(tmp_path / "file"))) == 2
    assert "--plot: expected a folder" in capsys.readouterr().err


def test_an_interrupted_bench_leaves_no_folder(tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("leanmla.bench.runner.run_bench", interrupted)
    argv = ("bench", "--device", "cpu", "--cases", "1x64", "--formats", "bf16", "--plot")
    assert main((*argv, str(tmp_path / "new" / "deep"))) == 130
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    assert main((*argv, str(tmp_path / "mine" / "new"))) == 130
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


# -- figures of README and docs ----------------------------------------------------------------------------------------


def test_committed_figures_are_made_from_the_committed_results():
    """No picture in docs/figures is older than its JSON, none is drawn by hand. Otherwise: make figures."""
    assert list(figures_script().problems()) == []


@needs_matplotlib
def test_a_changed_result_is_noticed_and_drawn_anew(tmp_path):
    script = figures_script()
    results, figures = tmp_path / "results", tmp_path / "figures"
    results.mkdir(), figures.mkdir()
    write_run(results / "one.json")

    def draw_all() -> list[str]:
        found = script.problems(results, figures)
        for draw in found.values():
            draw()
        return list(found)

    assert "one.json has no figure" in draw_all()
    assert draw_all() == []
    assert {p.name for p in figures.glob("one-*")} == {
        f"one-{n}.svg" for n in ("sweep-batch", "sweep-kv", "roofline", "speedup", "geomean")
    }
    document = read_json(results / "one.json")
    document["results"] = [r for r in document["results"] if not r["peer"]]
    write_json(results / "one.json", document)
    [words] = draw_all()
    assert words.startswith("one.json has changed since") and "one-roofline.svg" in words
    assert draw_all() == [] and not (figures / "one-speedup.svg").exists()
    (figures / "by-hand.svg").write_text("<svg/>")
    assert draw_all() == ["by-hand.svg is made from nothing, which is not there"]
    (results / "one.json").unlink()
    assert draw_all() and not list(figures.glob("one-*"))


@needs_matplotlib
def test_prefix_and_sources_of_saved_figures(tmp_path):
    run = gpu_run(cases=cases_named("2x64"), contenders={"auto bf16": CONTENDERS["auto bf16"]})
    paths = save_bench_figures(run, tmp_path, suffix=".png", prefix="p-", sources={"b.json": "cd" * 32, "a.json": "ab" * 32})
    assert len(paths) == 1 and all(p.name.startswith("p-") for p in paths)
    assert sources_of(paths[0]) == {"a.json": "ab" * 32, "b.json": "cd" * 32}
    assert render(roofline_figure(run), "svg") == render(roofline_figure(run), "svg")
