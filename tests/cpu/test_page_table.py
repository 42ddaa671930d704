"""PageTable: three ways in, one meaning out."""

import pytest
import torch
from _helpers import i32

from leanmla import InvalidArgument, InvalidDtype, InvalidTable, PageTable


def test_csr():
    table = PageTable.from_csr(i32(0, 2, 2, 3), i32(7, 1, 4, 999), i32(3, 77, 4), page_size=4)
    assert table.batch == 3 and table.kind == "csr"
    assert table.kv_lens().tolist() == [7, 0, 4]
    assert table.slots(0).tolist() == [28, 29, 30, 31, 4, 5, 6]
    assert table.slots(1).tolist() == [] and table.slots(2).tolist() == [16, 17, 18, 19]


def test_csr_page_size_one_ignores_the_last_page_length():
    for last in (i32(5, 2), i32(1, 1), None):
        table = PageTable.from_csr(i32(0, 5, 7), i32(3, 1, 4, 1, 5, 9, 2), last, page_size=1)
        assert table.kv_lens().tolist() == [5, 2]
        assert table.slots(1).tolist() == [9, 2]
        table.check_contents(10)


def test_block_table():
    table = PageTable.from_block_table(torch.tensor([[5, 2, -1], [-1, -1, -1]], dtype=torch.int32), i32(6, 0), page_size=4)
    assert table.kv_lens().tolist() == [6, 0]
    assert table.slots(0).tolist() == [20, 21, 22, 23, 8, 9] and table.slots(1).numel() == 0
    table.check_contents(6)


def test_contiguous():
    table = PageTable.contiguous(i32(0, 3, 3, 5))
    assert table.kv_lens().tolist() == [3, 0, 2] and table.slots(2).tolist() == [3, 4]


def test_in_place_updates_are_seen():
    lens = i32(6, 0)
    table = PageTable.from_block_table(torch.tensor([[5, 2], [0, 1]], dtype=torch.int32), lens, page_size=4)
    lens.copy_(i32(7, 2))
    assert table.kv_lens().tolist() == [7, 2]


def test_row_stride_of_a_block_table_is_free():
    wide = torch.arange(20, dtype=torch.int32).view(2, 10)
    table = PageTable.from_block_table(wide[:, 3:6], i32(3, 2), page_size=1)
    assert table.slots(1).tolist() == [13, 14]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PageTable.from_csr(i32(0, 1), i32(0), i32(1), page_size=0), "page_size: expected a positive integer"),
        (lambda: PageTable.from_csr(i32(0, 1), i32(0), None, page_size=4), "kv_last_page_len: expected int32"),
        (lambda: PageTable.from_csr(i32(0, 1), i32(0), i32(1, 1), page_size=4), r"kv_last_page_len: expected \[1\]"),
        (lambda: PageTable.from_csr(i32(), i32(0), i32(), page_size=4), "kv_indptr: expected"),
        (lambda: PageTable.from_csr(i32(0, 1)[None], i32(0), i32(1), page_size=4), "kv_indptr: expected 1 dims"),
        (lambda: PageTable.from_block_table(i32(0, 1), i32(1), page_size=4), "block_table: expected 2 dims"),
        (lambda: PageTable.from_block_table(i32(0, 1)[None], i32(1, 2), page_size=4), r"cache_seqlens: expected \[1\]"),
        (lambda: PageTable.contiguous(i32(0, 1, 2, 3)[::2]), "kv_indptr: the last dim must be contiguous"),
        (lambda: PageTable.contiguous([0, 1]), "kv_indptr: expected an int32 tensor"),
        (
            lambda: PageTable.from_block_table(i32(0, 1)[None], torch.zeros(1, dtype=torch.int32, device="meta"), page_size=4),
            "all tensors must be on one device, got block_table on cpu, cache_seqlens on meta",
        ),
    ],
)
def test_refuses_shapes(make, text):
    with pytest.raises(InvalidArgument, match=text):
        make()


def test_refuses_other_integer_types():
    with pytest.raises(InvalidDtype, match="kv_indptr: expected int32, got int64.*refers to your tensor"):
        PageTable.contiguous(torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            PageTable.from_csr(i32(0, 2, 1), i32(0, 1), i32(1, 1), page_size=4),
            "kv_indptr: expected rising offsets, got 2 then 1",
        ),
        (PageTable.from_csr(i32(1, 2), i32(0, 1), i32(1), page_size=4), r"kv_indptr\[0\]: expected 0, got 1"),
        (PageTable.from_csr(i32(0, 3), i32(0, 1), i32(1), page_size=4), r"kv_indptr\[-1\]: expected at most 2 .*got 3"),
        (PageTable.from_csr(i32(0, 2), i32(0, 1), i32(5), page_size=4), r"kv_last_page_len\[0\]: expected 1..4, got 5"),
        (PageTable.from_csr(i32(0, 2), i32(0, 1), i32(0), page_size=4), r"kv_last_page_len\[0\]: expected 1..4, got 0"),
        (
            PageTable.from_csr(i32(0, 2), i32(0, 8), i32(4), page_size=4),
            "page ids: expected 0..7 where a page holds keys, got 8",
        ),
        (PageTable.from_block_table(i32(0, -1)[None], i32(5), page_size=4), "page ids: expected 0..7.*got -1"),
        (PageTable.from_block_table(i32(0, 1)[None], i32(9), page_size=4), r"cache_seqlens\[0\]: expected 0..8.*got 9"),
        (PageTable.from_block_table(i32(0, 1)[None], i32(-1), page_size=4), r"cache_seqlens\[0\]: expected 0..8.*got -1"),
        (PageTable.contiguous(i32(0, 9)), r"kv_indptr\[-1\]: expected at most 8 \(tokens present\), got 9"),
    ],
)
def test_check_contents_names_what_is_wrong(table, text):
    with pytest.raises(InvalidTable, match=text):
        table.check_contents(8)
