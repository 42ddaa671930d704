"""Decisions and refusals of the FlyDSL backend; FlyDSL itself is not needed."""

from __future__ import annotations

import hashlib
import io
import struct
import tokenize
from pathlib import Path

import pytest

from leanmla import backends, device
from leanmla.device import DeviceInfo
from leanmla.kernels.flydsl.build import lay_out
from leanmla.kernels.flydsl.spec import COMBINE_ARGS, DECODE_ARGS, LDS_LIMIT, PLAN_ARGS, SPLIT_MODES, DecodeSpec, row_tiles_for
from leanmla.kernels.flydsl.splits import work_shape
from leanmla.problem import DecodeProblem

MI355X = DeviceInfo("hip", "AMD Instinct MI355X", "gfx950", 256, LDS_LIMIT, 288 << 30)
H100 = DeviceInfo("cuda", "NVIDIA H100", "sm_90", 132, 232448, 80 << 30)


def problem(**changes) -> DecodeProblem:
    base = DecodeProblem(
        format="mxfp4", num_heads=16, batch=64, total_q=64, max_q_len=1, ragged_q=False, page_size=64, table_kind="block_table",
        max_kv_len=8192, total_kv=64 * 8192,
    )  # fmt: skip
    return base.replace(**changes)


def test_registered_and_refused_without_the_card():
    assert "flydsl" in backends.NAMES
    reason = backends.why_not("flydsl", problem(), H100)
    assert reason is not None and "gfx950" in reason and "sm_90" in reason


def test_chosen_on_the_card():
    with device.override(MI355X, assume_installed=("flydsl", "triton")):
        assert backends.why_not("flydsl", problem(), MI355X) is None
        assert backends.choose(problem(), MI355X).name == "flydsl"
        config = backends.get("flydsl").launch_config(problem(), MI355X)
    assert config.block_rows == 16 and config.block_kv == 64
    assert ("status", "built and emulated, not yet run on hardware") in config.extra


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "mxfp4_row320"}, "no kernel for cache format"),
        ({"q_dtype": "fp16"}, "bf16 queries"),
        ({"max_kv_len": 1 << 27}, "below"),
        ({"num_kv_splits": 40000}, "splits"),
        ({"num_heads": 128, "batch": 1 << 18, "total_q": 1 << 18}, "threads"),
    ],
)
def test_refusals(changes, words):
    with device.override(MI355X, assume_installed=("flydsl",)):
        reason = backends.why_not("flydsl", problem(**changes), MI355X)
    assert reason is not None and words in reason


def test_refused_where_flydsl_is_missing(monkeypatch):
    monkeypatch.setattr("leanmla.kernels.flydsl.backend.flydsl_missing", lambda: "needs flydsl, which is not installed")
    assert backends.why_not("flydsl", problem(), MI355X) == "needs flydsl, which is not installed"


def test_other_versions_are_refused(monkeypatch):
    from leanmla.kernels.flydsl import toolchain

    monkeypatch.setattr(toolchain, "flydsl_version", lambda: "0.6.1")
    with device.override(MI355X, assume_installed=("flydsl",)):
        assert "flydsl==0.5.0" in (backends.why_not("flydsl", problem(), MI355X) or "")


def test_split_ranges_without_wide_products():
    """decode.py cuts tiles * split // count as whole * split + rest * split // count."""
    for tiles in (0, 1, 7, 64, 1000, (1 << 21) - 1):
        for count in (1, 2, 3, 32, 2049, 32767):
            whole, rest = divmod(tiles, count)
            for split in {0, 1, count // 2, count - 1, count}:
                assert whole * split + rest * split // count == tiles * split // count
                assert rest * split < 1 << 31


def test_importing_the_backend_imports_no_flydsl():
    import subprocess
    import sys

    code = "import sys, leanmla.kernels.flydsl.backend, leanmla.kernels.flydsl.build; sys.exit('flydsl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("table", [DECODE_ARGS, COMBINE_ARGS, PLAN_ARGS])
def test_arguments_need_no_padding(table):
    arguments, size = lay_out(table)
    packed = struct.calcsize("<" + "".join({"i64": "q", "i32": "i", "f32": "f"}[a.kind] for a in arguments))
    last = arguments[-1]
    assert last.offset + struct.calcsize({"i64": "q", "i32": "i", "f32": "f"}[last.kind]) == packed
    assert 0 <= size - packed < 8
    assert len({a.name for a in arguments}) == len(arguments)


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 4), (64, 4), (512, 4)])
def test_row_tiles(rows, tiles):
    assert row_tiles_for(rows) == tiles


@pytest.mark.parametrize("format", ["bf16", "fp8", "mxfp4", "fp8_tile128"])
@pytest.mark.parametrize("row_tiles", [1, 2, 4])
def test_two_blocks_fit_where_promised(row_tiles, format):
    spec = DecodeSpec(format, 16 * row_tiles, row_tiles, "csr", 1, False, False, False, "one")
    assert spec.lds.size * spec.blocks_per_cu <= LDS_LIMIT
    # Each part begins where the one before ends, on 16 bytes.
    assert spec.lds.keys < spec.lds.probabilities < spec.lds.maxima < spec.lds.scales <= spec.lds.size
    assert not (spec.lds.probabilities | spec.lds.maxima | spec.lds.scales) & 15


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("splits", [{}, {"num_kv_splits": 1}, {"num_kv_splits": 5}, {"split_size": 256}])
def test_work_shape_covers_every_row(heads, q_len, splits):
    p = problem(num_heads=heads, max_q_len=q_len, total_q=64 * q_len, **splits)
    shape = work_shape(p)
    assert shape.split_mode in SPLIT_MODES
    assert shape.row_capacity >= heads * q_len > shape.row_capacity - 64
    assert shape.grid == shape.max_items * shape.row_blocks
    assert shape.max_items >= p.batch


def test_items_bound_holds():
    """The grid has room for what the planner's definition makes of any lengths."""
    import random

    from leanmla.split_plan import plan_splits

    rng = random.Random(0)
    for _ in range(40):
        lens = [rng.choice((0, 1, 63, 64, 65, 500, 4096, 100000)) for _ in range(rng.randint(1, 40))]
        size = rng.choice((None, 64, 100, 1024))
        width = max(max(lens), 65)
        p = problem(batch=len(lens), total_q=len(lens), max_kv_len=width, total_kv=max(sum(lens), width), split_size=size)
        shape = work_shape(p)
        plan = plan_splits(lens, num_workers=shape.num_workers, split_size=size)
        assert len(plan.items) <= shape.max_items, (lens, size)


@pytest.mark.parametrize(("seed", "workers", "chunk", "items"), [(8, 7, 39, 12), (64, 128, 15, 174), (300, 512, 19, 729)])
def test_definition_that_the_device_planner_repeats(seed, workers, chunk, items):
    """plan.py was compared with the definition as it stood when it gave these values: if this fails, plan.py has to follow."""
    import random

    from leanmla.split_plan import plan_splits

    rng = random.Random(seed)
    lens = [rng.choice((0, 1, 64, 65, 1000, 5000, rng.randint(0, 20000))) for _ in range(seed)]
    plan = plan_splits(lens, num_workers=workers)
    assert (plan.chunk_blocks, len(plan.items)) == (chunk, items)


def code_of(path: Path) -> str:
    """What a source file says, without comments, docstrings and white space."""
    kept, starts_line = [], True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if not (starts_line and token.type == tokenize.STRING):
            kept.append(token.string)
        starts_line = token.type == tokenize.NEWLINE
    return "".join("".join(kept).split())


#: Kernel source -> digest of the code that the tables of docs/mi355x.md were made with.
EMULATED = {
    "combine.py": "f342e037db27928f",
    "decode.py": "4e36b8929e85a039",
    "lanes.py": "cfa1223b712217e0",
    "ops.py": "2916bde7044bb8c6",
    "pages.py": "fdced1e828926f49",
    "plan.py": "f0483181ea4f48db",
    "scaled.py": "a552ec2d9f6b4fc1",
    "spec.py": "c82d4c530ce910f9",
    "staging.py": "5638f099ce508860",
}


@pytest.mark.parametrize("name", sorted(EMULATED))
def test_kernels_are_those_that_were_emulated(name):
    """Instruction counts do not see a wrong offset or a lost select and there is no card: changed kernels have to be emulated again."""
    import leanmla.kernels.flydsl as package

    code = code_of(Path(package.__file__).with_name(name))
    assert hashlib.sha256(code.encode()).hexdigest()[:16] == EMULATED[name], (
        f"{name} changed: run the emulator's tables of docs/mi355x.md again, then record the new digest here"
    )
