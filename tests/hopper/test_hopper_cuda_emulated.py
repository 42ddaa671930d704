"""The CUDA C++ kernel's sources, compiled for the CPU and run thread by thread: every line but the instructions themselves (``emulated/ptx.cuh``)."""

from __future__ import annotations

import ctypes
import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import leanmla
from leanmla import device as devices
from leanmla.bench.cases import BenchCase
from leanmla.device import DeviceInfo
from leanmla.formats import mxfp4_row320
from leanmla.kernels.hopper_cuda import backend, compiler, launch_configs, tune
from leanmla.kernels.hopper_cuda.compiler import FORMATS
from leanmla.reference import mla_decode_reference
from leanmla.testing import mx_scales
from leanmla.testing.cases import DecodeCase, case_grid
from leanmla.testing.compare import compare
from leanmla.testing.inputs import make_inputs

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HERE = Path(__file__).parent / "emulated"
#: Few multiprocessors, so that small cases are cut into pieces of several sequences and sequences into several pieces.
SMALL = DeviceInfo("cuda", "a small Hopper GPU", "sm_90", 3, 232448, 8 << 30)
AT_ONCE = 8  #: blocks that run side by side


@functools.cache
def emulator(fmt: str, arrangement: launch_configs.Arrangement):
    """One library a format and arrangement: what a variant fixes is read from the call here."""
    folder = Path(tempfile.mkdtemp(prefix="leanmla-emulated-"))
    for source in compiler.FOLDER.iterdir():
        if source.suffix in (".cu", ".cuh"):
            shutil.copy(source, folder)
    for source in HERE.iterdir():
        shutil.copy(source, folder)
    text = compiler.source_text(compiler.Variant(fmt, False, False, arrangement))
    (folder / "variant.cu").write_text(
        re.sub(
            r"#define Q_IS_FP16 \d\n#define HAS_CAP \d", "#define Q_IS_FP16 emulator::fp16\n#define HAS_CAP emulator::cap", text
        )
    )
    library = folder / "emulated.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
    done = subprocess.run(["g++", *flags, "-o", str(library), str(folder / "emulate.cpp")], capture_output=True, text=True)
    if "_Float16" in done.stderr:
        pytest.skip("needs a g++ that has _Float16 (12 or newer)")
    assert done.returncode == 0, done.stderr[:3000]
    function = ctypes.CDLL(str(library)).emulate
    shutil.rmtree(folder)  # the library stays mapped
    function.restype = ctypes.c_char_p
    return function


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    def launch(device, variant, grid, arguments):
        options = (AT_ONCE, launch.seed, launch.sum_bits, variant.q_is_fp16, variant.has_cap)
        trouble = emulator(variant.format, variant.arrangement)(ctypes.byref(arguments), grid, *options)
        assert trouble is None, trouble.decode()

    launch.seed, launch.sum_bits = 1, 0
    monkeypatch.setattr(backend, "_launch", launch)
    with devices.override(SMALL, assume_installed=("cuda",)):
        yield launch


def run(inputs, **changes):
    options = {**inputs.options, **inputs.splits, **changes}
    return leanmla.mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="hopper_cuda", **options)


def check(case: DecodeCase) -> None:
    inputs = make_inputs(case)
    out, lse = run(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    report = compare(inputs, out, reference=(want, want_lse))
    assert report, report.message
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    seen = want_lse.isfinite()
    # two e4m3 terms hold a bf16 query and nearly a fp16 one
    bound = (1e-3 if case.q_dtype == "fp16" else 3e-4) + 2e-4 * want_lse[seen].abs()
    assert bool(((lse.double() - want_lse)[seen].abs() <= bound).all())


#: Beside the case grid.
CASES = [
    DecodeCase((17, 130, 64, 0), q_lens=3),
    DecodeCase((700, 5)),
    DecodeCase((1, 2, 33, 64), num_kv_splits=3),
    DecodeCase((150, 9, 64, 31), q_lens=(3, 0, 1, 7), table="csr", num_heads=5),
    DecodeCase((200, 77), q_dtype="fp16", strided=True),
    DecodeCase((200, 50), logit_shift=1000.0, num_kv_splits=2),
]


@pytest.mark.parametrize("case", [case.replace(format=fmt) for fmt in FORMATS for case in CASES], ids=lambda c: c.id)
def test_cases(case):
    check(case)


#: Several tiles a group, references that rise, masked keys, pieces of several sequences, merges of more than 16 parts, fp16 without pairs.
FEW = [
    DecodeCase((700, 5), q_lens=2, q_std=4.0),
    DecodeCase((17, 0, 130), table="csr", page_size=5, num_heads=20),
    DecodeCase((1300,), num_kv_splits=18, num_heads=4),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", launch_configs.ARRANGEMENTS)
def test_arrangements(name, fmt):
    with launch_configs.using(name):
        for case in FEW:
            check(case.replace(format=fmt))


@pytest.mark.parametrize("q_std, shift", [(100.0, 0.0), (8.0, 300.0), (30.0, 0.0)])
@pytest.mark.parametrize("bits", [13])
@pytest.mark.parametrize("fmt", FORMATS)
def test_large_scores_are_taken_again(emulated, fmt, bits, q_std, shift):
    """Fp8 products keep about 14 bits of a running sum, an error of 1e-3 of a score; scores that are large and matter are as in fp32."""
    emulated.sum_bits = bits
    case = DecodeCase((300, 40), q_lens=2, num_heads=5, q_std=q_std, logit_shift=shift, format=fmt)
    for cap in (0.0, 50.0):
        inputs = make_inputs(case.replace(logit_cap=cap))
        want = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
        out, lse = run(inputs)
        report = compare(inputs, out, reference=want)
        assert report, report.message
        assert float((lse.double() - want[1]).abs().max()) < 5e-3


def row_tiles(case: DecodeCase) -> int:
    """What a case costs here: tiles of 64 keys times tiles of 16 rows."""
    most = case.q_lens if isinstance(case.q_lens, int) else max(case.q_lens)
    return sum(max(-(-n // 64), 1) for n in case.kv_lens) * -(-case.num_heads * most // 16)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in case_grid(FORMATS) if row_tiles(case) <= 64], ids=lambda c: c.id)
def test_grid(case):
    """All but the two largest cases, which take a quarter of the time; half of them with each arrangement."""
    if (case.split_size or 64) % 64:
        pytest.skip("split sizes are multiples of 64 here")
    with launch_configs.using(list(launch_configs.ARRANGEMENTS)[len(case.id) % 2]):
        check(case)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("table, page_size", [("block_table", 64), ("csr", 1)])
def test_neither_unread_storage_nor_the_order_of_copies_changes_a_bit(emulated, fmt, table, page_size):
    case = DecodeCase((300, 70, 1), q_lens=2, num_heads=6, table=table, page_size=page_size, format=fmt)
    out, lse = run(make_inputs(case))
    for seed, poison in ((2, True), (3, False)):
        emulated.seed = seed
        inputs = make_inputs(case, poison=poison)
        if fmt == "mxfp4_row320":
            inputs.cache.data[..., mxfp4_row320.FINITE_EXPONENT_AT :] = 255  # of rows without NaN: unused
        again, lse_again = run(inputs)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", launch_configs.ARRANGEMENTS)
def test_nan_that_is_read_stays_nan(name, fmt):
    with launch_configs.using(name):
        inputs = make_inputs(DecodeCase((100, 70), q_lens=2, num_heads=8, format=fmt))
        clean, _ = run(inputs)
        latent = torch.randn(1, 576, dtype=torch.bfloat16)
        latent[:, 40] = torch.nan
        inputs.cache.append(latent, inputs.table.slots(0)[99:100])  # the last key: seen by the last row alone
        out, lse = run(inputs)
        expected = torch.tensor([False, True, False, False])
        assert torch.equal(out.isnan().flatten(1).all(1), expected) and torch.equal(out.isnan().flatten(1).any(1), expected)
        assert torch.equal(lse.isnan().any(1), expected)
        assert torch.equal(out[~expected], clean[~expected])


@pytest.mark.parametrize("fmt", FORMATS)
def test_counters_serve_one_call_after_the_other(fmt):
    plan = leanmla.DecodePlan(
        num_heads=16, format=fmt, page_size=64, max_batch=4, max_kv_len=320, device="cpu", backend="hopper_cuda"
    )
    for lens in ((300, 5), (64,), (0, 0, 0), (200, 70, 0, 64), (300, 5)):
        inputs = make_inputs(DecodeCase(lens, format=fmt))
        out, lse = plan.run(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options)
        assert compare(inputs, out, lse)


SCALES = DecodeCase((100, 17, 64), num_heads=4, format="mxfp4")


@pytest.mark.parametrize("spread", [3, 15, 40])
def test_scales_of_tokens_far_apart(spread):
    mx_scales.check(mx_scales.exponents_far_apart(SCALES, spread, "cpu"), run)


@pytest.mark.parametrize("shift", [-90, -30, 30, 90])
def test_latent_and_rope_scales_far_apart(shift):
    mx_scales.check(mx_scales.latent_and_rope_far_apart(SCALES, shift, "cpu"), run)


def test_extreme_scales():
    mx_scales.check_every_byte(run, "cpu", (*range(0, 32, 3), 100, *range(225, 240, 2), 239))


@pytest.mark.parametrize("key, block", [(3, 0), (68, 16), (69, 15), (69, 17)])
def test_nan_scale_reaches_the_rows_that_see_it_and_no_other(key, block):
    inputs, sees = mx_scales.nan_scale(key, block, "cpu")
    out, lse = run(inputs)
    assert torch.equal(lse.isnan(), sees[:, None].expand_as(lse))
    assert torch.equal(out.isnan(), sees[:, None, None].expand_as(out))
    mx_scales.check(inputs, run)


def test_blocks_of_zeros_are_zeros():
    inputs = mx_scales.zero_blocks(SCALES, "cpu")
    assert float(run(inputs)[0][..., 32:96].abs().max()) == 0.0
    mx_scales.check(inputs, run)


def test_a_cache_of_zeros():
    """Scale bytes 0: their probabilities must not overflow what sums them."""
    inputs = make_inputs(SCALES)
    inputs.cache.data.zero_()
    inputs.cache.scale.zero_()
    out, lse = run(inputs)
    assert float(out.abs().max()) == 0.0
    want = torch.tensor(SCALES.kv_lens).log()[:, None].expand_as(lse)
    assert torch.allclose(lse, want, atol=1e-5)


@pytest.mark.parametrize(
    "table, page_size", [("csr", 1), ("block_table", 16), ("csr", 48), ("block_table", 64), ("contiguous", 64)]
)
def test_scales_anywhere(emulated, table, page_size):
    """Whatever their strides and alignment, and NaN around them."""
    case = SCALES.replace(table=table, page_size=page_size)
    want = run(make_inputs(case))
    for seed, (stride, start, between) in enumerate(
        ((18, 2, 0), (19, 1, 0), (24, 0, 0), (33, 15, 7), (48, 16, 16), (49, 0, 0))
    ):
        emulated.seed = seed
        got = run(mx_scales.with_scale_layout(make_inputs(case), stride, start, 0 if table == "contiguous" else between))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), (stride, start, between)


@pytest.mark.parametrize("fmt", FORMATS)
def test_tuning(tmp_path, monkeypatch, capsys, fmt):
    """The command itself, on small cases."""
    grid = [BenchCase((64, 70))]
    monkeypatch.setattr(tune, "CASES", (DecodeCase((64,)), DecodeCase((17, 0), num_heads=20)))
    monkeypatch.setattr(tune.cases, "contest_cases", lambda: grid)
    monkeypatch.setattr(tune.measure, "MAX_COPIES", 2)
    monkeypatch.setattr(tune.environment, "environment", lambda device: {"device": device})
    names = list(launch_configs.ARRANGEMENTS)
    assert tune.main([*names, "--format", fmt, "--rounds", "1", "--json", str(tmp_path / "t.json")]) == 0
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["wrong"] == {name: [] for name in names}
    assert [(r["contender"], r["status"]) for r in document["results"]] == [(name, "ok") for name in names]
    assert grid[0].label in capsys.readouterr().out.splitlines()[-2]
    monkeypatch.setattr(tune, "mla_decode", lambda *args, **options: [t * 1.1 for t in leanmla.mla_decode(*args, **options)])
    assert tune.main([names[0], "--format", fmt]) == 1
    assert "0 of 2 cases right" in capsys.readouterr().out
