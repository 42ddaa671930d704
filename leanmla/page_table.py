"""``PageTable``: where each sequence's keys lie, whatever way the caller keeps that.

The table holds *references* to the caller's tensors, in one form that kernels read directly. Updating those tensors in
place (kv grows, a batch shrinks) is therefore seen by the next call, also inside a replayed CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import InvalidArgument, InvalidDtype, InvalidTable

__all__ = ["PageTable"]


def _index_tensor(name: str, t: torch.Tensor, ndim: int, *, shape: str) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(f"{name}: expected an int32 tensor {shape}, got {type(t).__name__}.")
    if t.dtype != torch.int32:
        raise InvalidDtype(
            f"{name}: expected int32, got {str(t.dtype).removeprefix('torch.')}. Convert once with .to(torch.int32) and keep the result: "
            "the table refers to your tensor, it does not copy it."
        )
    if t.ndim != ndim:
        raise InvalidArgument(f"{name}: expected {ndim} dims {shape}, got shape {list(t.shape)}.")
    if t.numel() and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise InvalidArgument(f"{name}: the last dim must be contiguous, got strides {t.stride()}. Call .contiguous().")
    return t


def _page_size(page_size: int) -> int:
    if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
        raise InvalidArgument(f"page_size: expected a positive integer (tokens a page), got {page_size!r}.")
    return page_size


def _same_device(**tensors: torch.Tensor | None) -> None:
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{n} on {d}" for n, d in devices.items())
        raise InvalidArgument(f"page table: all tensors must be on one device, got {listing}. Move them together.")


@dataclass(frozen=True, eq=False)
class PageTable:
    """Pages of every sequence. Build one with :meth:`from_csr`, :meth:`from_block_table` or :meth:`contiguous`.

    The pages of sequence ``b`` start at ``page_ids[kv_indptr[b]]`` (``kind`` "csr") or ``page_ids[b, 0]``
    ("block_table"); with ``kind`` "contiguous" there are no ids and the tokens of ``b`` are cache slots
    ``kv_indptr[b] .. kv_indptr[b+1]-1``. A *slot* is ``page * page_size + offset``.
    """

    kind: str
    page_size: int
    batch: int
    page_ids: torch.Tensor | None
    kv_indptr: torch.Tensor | None
    kv_last_page_len: torch.Tensor | None
    cache_seqlens: torch.Tensor | None

    @classmethod
    def from_csr(
        cls,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor | None = None,
        *,
        page_size: int,
    ) -> PageTable:
        """A table in CSR form (FlashInfer, aiter).

        Args:
            kv_indptr: int32 [batch+1], offsets into ``kv_indices`` counted in **pages**.
            kv_indices: int32 [n], page ids; may be longer than ``kv_indptr[-1]``.
            kv_last_page_len: int32 [batch], tokens in each sequence's last page, 1..page_size. For page_size 1 it is
                not read and may be None (some callers put the whole length there).
            page_size: tokens a page.

        Raises:
            InvalidArgument, InvalidDtype: a shape, stride, dtype or device is wrong. Contents are only read by
                :meth:`check_contents`.
        """
        _page_size(page_size)
        _index_tensor("kv_indptr", kv_indptr, 1, shape="[batch+1]")
        _index_tensor("kv_indices", kv_indices, 1, shape="[num_page_ids]")
        if kv_indptr.numel() < 1:
            raise InvalidArgument("kv_indptr: expected [batch+1] with at least one entry, got an empty tensor.")
        batch = kv_indptr.numel() - 1
        if kv_last_page_len is None:
            if page_size != 1:
                raise InvalidArgument(
                    f"kv_last_page_len: expected int32 [{batch}] for page_size {page_size}, got None. "
                    "Only page_size 1 can do without it."
                )
        else:
            _index_tensor("kv_last_page_len", kv_last_page_len, 1, shape="[batch]")
            if kv_last_page_len.numel() != batch:
                raise InvalidArgument(
                    f"kv_last_page_len: expected [{batch}] to match kv_indptr [{batch + 1}], got {list(kv_last_page_len.shape)}."
                )
        _same_device(kv_indptr=kv_indptr, kv_indices=kv_indices, kv_last_page_len=kv_last_page_len)
        return cls("csr", page_size, batch, kv_indices, kv_indptr, kv_last_page_len, None)

    @classmethod
    def from_block_table(cls, block_table: torch.Tensor, cache_seqlens: torch.Tensor, *, page_size: int) -> PageTable:
        """A table with a padded row a sequence (FlashMLA, vLLM).

        Args:
            block_table: int32 [batch, max_pages]; entries past a sequence's pages are never read. The row stride is free.
            cache_seqlens: int32 [batch], keys of each sequence in **tokens**.
            page_size: tokens a page.

        Raises:
            InvalidArgument, InvalidDtype: a shape, stride, dtype or device is wrong.
        """
        _page_size(page_size)
        _index_tensor("block_table", block_table, 2, shape="[batch, max_pages]")
        _index_tensor("cache_seqlens", cache_seqlens, 1, shape="[batch]")
        if cache_seqlens.numel() != block_table.shape[0]:
            raise InvalidArgument(
                f"cache_seqlens: expected [{block_table.shape[0]}] to match block_table {list(block_table.shape)}, "
                f"got {list(cache_seqlens.shape)}."
            )
        _same_device(block_table=block_table, cache_seqlens=cache_seqlens)
        return cls("block_table", page_size, block_table.shape[0], block_table, None, None, cache_seqlens)

    @classmethod
    def contiguous(cls, kv_indptr: torch.Tensor) -> PageTable:
        """Sequences one after the other, without pages.

        Args:
            kv_indptr: int32 [batch+1], offsets in **tokens**: sequence b owns cache slots kv_indptr[b]..kv_indptr[b+1]-1.
        """
        _index_tensor("kv_indptr", kv_indptr, 1, shape="[batch+1]")
        if kv_indptr.numel() < 1:
            raise InvalidArgument("kv_indptr: expected [batch+1] with at least one entry, got an empty tensor.")
        return cls("contiguous", 1, kv_indptr.numel() - 1, None, kv_indptr, None, None)

    @property
    def device(self) -> torch.device:
        """Where the table's tensors lie."""
        t = self.cache_seqlens if self.kv_indptr is None else self.kv_indptr
        assert t is not None
        return t.device

    @property
    def max_pages(self) -> int | None:
        """Bound on one sequence's pages from shapes alone; None for contiguous tables."""
        if self.page_ids is None:
            return None
        return self.page_ids.shape[-1]

    def kv_lens(self) -> torch.Tensor:
        """Keys of each sequence, int64 [batch], on the table's device. Reads the tables (no host sync on a GPU)."""
        if self.kind == "block_table":
            assert self.cache_seqlens is not None
            return self.cache_seqlens.long()
        assert self.kv_indptr is not None
        pages = self.kv_indptr[1:].long() - self.kv_indptr[:-1].long()
        if self.kind == "contiguous" or self.page_size == 1:
            return pages
        assert self.kv_last_page_len is not None
        return torch.where(pages > 0, (pages - 1) * self.page_size + self.kv_last_page_len.long(), 0)

    def slots(self, b: int) -> torch.Tensor:
        """Cache slots of sequence ``b``'s keys in order, int64 [kv_len]. Host code: it syncs on a GPU."""
        kv_len = int(self.kv_lens()[b])
        token = torch.arange(kv_len, device=self.device)
        if self.kind == "contiguous":
            assert self.kv_indptr is not None
            return token + int(self.kv_indptr[b])
        assert self.page_ids is not None
        if self.kind == "csr":
            assert self.kv_indptr is not None
            pages = self.page_ids[int(self.kv_indptr[b]) :]
        else:
            pages = self.page_ids[b]
        return pages[token // self.page_size].long() * self.page_size + token % self.page_size

    def check_contents(self, num_pages: int) -> None:
        """Read the tables and refuse what does not describe a batch over ``num_pages`` pages.

        Costs a copy to the host, hence on request only.

        Raises:
            InvalidTable: offsets not rising from 0, too many pages, a last page length out of range, a page id
                outside the cache, a length beyond the table's width.
        """
        if self.kind == "block_table":
            assert self.cache_seqlens is not None and self.page_ids is not None
            lens = self.cache_seqlens.cpu().long()
            capacity = self.page_ids.shape[1] * self.page_size
            for b in ((lens < 0) | (lens > capacity)).nonzero().flatten().tolist()[:1]:
                raise InvalidTable(
                    f"cache_seqlens[{b}]: expected 0..{capacity} ({self.page_ids.shape[1]} pages of {self.page_size} "
                    f"in block_table), got {int(lens[b])}. Widen block_table or shorten the sequence."
                )
        else:
            assert self.kv_indptr is not None
            indptr = self.kv_indptr.cpu().long()
            if int(indptr[0]) != 0:
                raise InvalidTable(f"kv_indptr[0]: expected 0, got {int(indptr[0])}.")
            for b in (indptr[1:] < indptr[:-1]).nonzero().flatten().tolist()[:1]:
                raise InvalidTable(
                    f"kv_indptr: expected rising offsets, got {int(indptr[b])} then {int(indptr[b + 1])} at sequence {b}."
                )
            unit = "tokens" if self.kind == "contiguous" else "page ids"
            capacity = num_pages if self.page_ids is None else self.page_ids.numel()
            if int(indptr[-1]) > capacity:
                raise InvalidTable(
                    f"kv_indptr[-1]: expected at most {capacity} ({unit} present), got {int(indptr[-1])}. "
                    + (
                        "kv_indptr counts pages, not tokens."
                        if self.kind == "csr"
                        else "The cache is shorter than the table says."
                    )
                )
            if self.kv_last_page_len is not None and self.page_size > 1:
                last = self.kv_last_page_len.cpu().long()
                pages = indptr[1:] - indptr[:-1]
                # A padded row may keep one page (any id) with last length 0: its kv_len is 0.
                padded = (pages == 1) & (last == 0)
                used = (pages > 0) & ~padded
                for b in (used & ((last < 1) | (last > self.page_size))).nonzero().flatten().tolist()[:1]:
                    raise InvalidTable(
                        f"kv_last_page_len[{b}]: expected 1..{self.page_size}, got {int(last[b])}. "
                        "It counts tokens in the sequence's last page."
                    )
        if self.page_ids is not None and self.page_ids.numel():
            ids = self.page_ids.cpu()
            if self.kind == "csr":
                used_ids = ids[: int(indptr[-1])]
                if self.kv_last_page_len is not None and self.page_size > 1:
                    used_ids = used_ids[~torch.repeat_interleave(padded, pages)]
            else:
                used_pages = -(-lens // self.page_size)
                used_ids = ids[torch.arange(ids.shape[1], device="cpu") < used_pages[:, None]]
            outside = (used_ids < 0) | (used_ids >= num_pages)
            if bool(outside.any()):
                raise InvalidTable(
                    f"page ids: expected 0..{num_pages - 1} where a page holds keys, got {int(used_ids[outside][0])}. "
                    "Only entries past a sequence's pages may hold anything."
                )
