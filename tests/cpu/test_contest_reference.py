"""The contest's inputs, its reference answer and its check."""

import pytest
import torch

from leanmla import LatentCache, PageTable
from leanmla.contest import check_implementation, generate_input, ref_kernel, utils
from leanmla.contest.reference import quantize_fp8
from leanmla.formats import FP8, MXFP4
from leanmla.reference import mla_decode_reference


def test_inputs_have_the_documented_form():
    q, kv, qo, kvp, config = generate_input(3, 2, 40, 7, num_heads=5)
    assert q.shape == (6, 5, 576) and q.dtype == torch.bfloat16
    assert kv["bf16"].shape == (120, 1, 576) and kv["bf16"].dtype == torch.bfloat16
    assert kv["fp8"][0].shape == (120, 1, 576) and kv["fp8"][0].dtype == torch.float8_e4m3fn and kv["fp8"][1].shape == (1,)
    assert kv["mxfp4"][0].shape == (120, 1, 288) and kv["mxfp4"][1].shape == (120, 18)
    assert qo.tolist() == [0, 2, 4, 6] and kvp.tolist() == [0, 40, 80, 120] and qo.dtype == kvp.dtype == torch.int32
    assert config == {
        "batch_size": 3, "num_heads": 5, "num_kv_heads": 1, "qk_head_dim": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "v_head_dim": 512, "q_seq_len": 2, "kv_seq_len": 40, "sm_scale": 576**-0.5,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(q, torch.randn(6, 5, 576, dtype=torch.bfloat16, generator=generator))
    assert torch.equal(kv["bf16"], torch.randn(120, 1, 576, dtype=torch.bfloat16, generator=generator))
    assert not torch.equal(q, generate_input(3, 2, 40, 8, num_heads=5)[0])


def test_the_three_caches_are_of_the_same_values():
    kv = generate_input(1, 1, 30, 1)[1]
    latent = kv["bf16"].view(30, 576)
    fp8 = FP8().quantize(latent)
    assert torch.equal(kv["fp8"][0].view(30, 576).view(torch.uint8), fp8.data) and torch.equal(kv["fp8"][1], fp8.scale)
    mx = MXFP4().quantize(latent)
    assert torch.equal(kv["mxfp4"][0].view(torch.uint8).view(30, 288), mx.data)
    assert torch.equal(kv["mxfp4"][1].view(torch.uint8), mx.scale)


@pytest.mark.parametrize("q_len, kv_len", [(1, 50), (3, 50), (4, 2)])
def test_reference_is_fp8_query_times_fp8_cache(q_len, kv_len):
    data = generate_input(2, q_len, kv_len, 3, num_heads=4)
    q, kv, qo, kvp, config = data
    q8, scale = quantize_fp8(q)
    want, _ = mla_decode_reference(
        q8.double() * scale.double(), LatentCache.from_tensors(*kv["fp8"], format="fp8", page_size=1), PageTable.contiguous(kvp),
        sm_scale=config["sm_scale"], qo_indptr=qo,
    )  # fmt: skip
    torch.testing.assert_close(ref_kernel(data).double(), want, atol=1e-3, rtol=2**-8)
    exact, _ = mla_decode_reference(
        q, LatentCache.from_tensors(kv["bf16"], format="bf16", page_size=1), PageTable.contiguous(kvp), sm_scale=config["sm_scale"],
        qo_indptr=qo,
    )  # fmt: skip
    assert float((want - exact).abs().max()) > 1e-3, "the quantisation shows"


@pytest.mark.parametrize("kv_len", [64, 1024])
def test_every_cache_format_is_within_the_tolerance(kv_len):
    data = generate_input(4, 1, kv_len, 4220)
    for name in ("mxfp4", "fp8", "bf16"):
        cache = LatentCache.from_tensors(*(data[1][name] if name != "bf16" else (data[1][name],)), format=name, page_size=1)
        out, _ = mla_decode_reference(data[0], cache, PageTable.contiguous(data[3]), sm_scale=576**-0.5)
        assert check_implementation(data, out.bfloat16()) == (True, "")


def test_the_check_says_what_is_wrong_in_one_sentence():
    data = generate_input(2, 1, 16, 5)
    good = ref_kernel(data)
    assert check_implementation(data, good) == (True, "")

    def wrong(output, text):
        ok, message = check_implementation(data, output)
        assert not ok and text in message and "\n" not in message and message.endswith(".")

    wrong(None, "not a tensor but a NoneType")
    wrong(good[:1], "shape [1, 16, 512], expected [2, 16, 512]")
    wrong(good.float(), "dtype float32, expected bfloat16")
    wrong(good.to_sparse(), "layout sparse_coo, expected an ordinary")
    wrong(good.to("meta"), "on meta, expected on cpu")
    nan = good.clone()
    nan[1, 3, 7] = torch.nan
    wrong(nan, "1 NaN of 16384 elements, the first at (1, 3, 7)")
    wrong(torch.zeros_like(good), "% of the elements lie outside 0.1 + 0.1 * |expected| (at most 5 % may)")


def test_five_percent_may_be_outside_and_no_more():
    expected = torch.ones(100, dtype=torch.bfloat16)
    for bad, ok in ((5, True), (6, False)):
        output = expected.clone()
        output[:bad] = 3.0
        output[50] = 1.19  # within 0.1 + 0.1
        good, message = utils.compare(output, expected, rtol=0.1, atol=0.1)
        assert good is ok and (ok or "6.00 %" in message)
    assert not utils.compare(expected.clone().fill_(torch.inf), expected, rtol=0.1, atol=0.1)[0]


def test_helpers_that_submissions_import():
    check = utils.make_match_reference(lambda data: data, rtol=1e-2, atol=1e-2, max_outside=0.0)
    assert check(torch.ones(3), torch.ones(3)) == (True, "") and not check(torch.ones(3), torch.zeros(3))[0]
    good, lines = utils.verbose_allclose(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]))
    assert not good and "1 of 2" in lines[0] and "(1,)" in lines[1]
    assert utils.verbose_allequal(torch.ones(2), torch.ones(2)) == (True, [])
    utils.set_seed(3)
    first = torch.rand(2)
    utils.set_seed(3)
    assert torch.equal(first, torch.rand(2))
    utils.clear_l2_cache()
