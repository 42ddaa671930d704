"""Append kernels on a GPU: bytes and counters equal the host codecs'."""

import pytest
import torch

from leanmla import LatentCache, device
from leanmla.formats import FORMATS
from leanmla.testing.inputs import hard_rows, uneven_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if device.triton_missing():
    pytest.skip(device.triton_missing(), allow_module_level=True)


@pytest.mark.parametrize("rule", ("even", "floor"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("fmt", tuple(FORMATS))
def test_bytes_equal_the_host_codecs(fmt, dtype, rule):
    if rule == "floor" and not fmt.startswith("mxfp4"):
        pytest.skip("only the mxfp4 formats have a scale rule")
    n = 300
    options = {"format": fmt, "mx_scale_rule": rule, **({"scale": 0.037} if fmt == "fp8" else {})}
    host = LatentCache.allocate(80, 5, **options)
    joined = LatentCache.allocate(80, 5, device="cuda", **options)
    apart = LatentCache.allocate(80, 5, device="cuda", **options)
    latent, slots = hard_rows(n, dtype), torch.randperm(400)[:n]
    slots[10:20] = -1
    host.append(latent, slots)
    joined.append(latent.cuda(), slots.int().cuda())
    apart.append_split(latent[:, :512].cuda(), latent[:, None, 512:].cuda(), slots.cuda())
    for cache in (joined, apart):
        assert torch.equal(host.data.view(torch.uint8), cache.data.cpu().view(torch.uint8))
        assert host.scale is None or torch.equal(host.scale, cache.scale.cpu())
        assert host.saturation_count == cache.saturation_count


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("fmt", ("mxfp4", "mxfp4_row320"))
def test_blocks_far_apart_equal_the_host_codecs(fmt, dtype):
    host, cache = (LatentCache.allocate(12, 4, format=fmt, device=where) for where in ("cpu", "cuda"))
    latent, slots = uneven_rows(dtype), torch.randperm(48)
    host.append(latent, slots)
    cache.append(latent.cuda(), slots.cuda())
    assert torch.equal(host.data, cache.data.cpu())
    assert host.scale is None or torch.equal(host.scale, cache.scale.cpu())
    assert host.saturation_count == cache.saturation_count > 0


@pytest.mark.parametrize("fmt", tuple(FORMATS))
def test_nan_stays_nan_where_it_was(fmt):
    cache = LatentCache.allocate(1, 4, format=fmt, device="cuda", **({"scale": 1.0} if fmt == "fp8" else {}))
    latent = torch.ones(1, 576, device="cuda")
    latent[0, 40] = torch.nan
    cache.append(latent, torch.tensor([2], device="cuda"))
    value = cache.dequantize()[0, 2]
    assert torch.isnan(value[40]) and not torch.isnan(value[200]) and not torch.isnan(value[570])
    assert (cache.data[0, [0, 1, 3]] == 0).all()


@pytest.mark.parametrize("fmt", tuple(FORMATS))
def test_append_is_one_launch_without_waiting_and_can_be_captured(fmt):
    cache = LatentCache.allocate(8, 64, format=fmt, device="cuda", **({"scale": 0.02} if fmt == "fp8" else {}))
    latent = torch.randn(32, 576, device="cuda").bfloat16()
    slots = torch.arange(32, device="cuda")
    cache.append(latent, slots)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append(latent, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(latent, slots)
    latent.normal_()
    slots += 100
    graph.replay()
    host = LatentCache.allocate(8, 64, format=fmt, **({"scale": 0.02} if fmt == "fp8" else {}))
    host.append(latent.cpu(), slots.cpu())
    assert torch.equal(host.data[1:].view(torch.uint8), cache.data[1:].cpu().view(torch.uint8))


def test_slots_outside_the_cache_are_not_written():
    cache = LatentCache.allocate(2, 4, format="bf16", device="cuda")
    cache.append(torch.ones(3, 576, device="cuda").bfloat16(), torch.tensor([-1, 3, 8], device="cuda"))
    assert cache.data.view(8, 576).sum(-1).tolist() == [0, 0, 0, 576, 0, 0, 0, 0]
