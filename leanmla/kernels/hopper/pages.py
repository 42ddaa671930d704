"""Where a sequence's keys lie, on the device: lengths and page ids of the three kinds of page table.

``Pages`` is the device form of :class:`leanmla.page_table.PageTable`. It only holds pointers, so a table updated in place is
read anew by every launch, also inside a replayed CUDA graph. No page id past a sequence's last key is ever read.
"""

from .gluon_names import aggregate, constexpr_function, gl, gluon

__all__ = ["BLOCK", "BLOCK_TABLE", "CONTIGUOUS", "CSR", "Pages"]

#: Kinds of table.
CSR, BLOCK_TABLE, CONTIGUOUS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
#: Keys a tile: the M side of one wgmma.
BLOCK = gl.constexpr(64)


@aggregate
class Pages:
    """A page table as kernels see it."""

    lens_ptr: gl.tensor  # csr: kv_indptr [batch+1] in pages; block_table: cache_seqlens [batch]; contiguous: kv_indptr in tokens
    last_ptr: gl.tensor  # csr: kv_last_page_len [batch], not read for page size 1; otherwise unused
    ids_ptr: gl.tensor  # csr: [n]; block_table: [batch, max_pages]; otherwise unused
    ids_stride: gl.tensor  # block_table: its row stride, in ids; csr: number of ids
    qo_ptr: gl.tensor  # qo_indptr [batch+1] if RAGGED_Q
    q_len: gl.tensor  # query tokens of every sequence if not RAGGED_Q
    batch: gl.tensor
    KIND: gl.constexpr
    PAGE_SIZE: gl.constexpr
    RAGGED_Q: gl.constexpr

    @constexpr_function
    def __init__(self, lens_ptr, last_ptr, ids_ptr, ids_stride, qo_ptr, q_len, batch, KIND, PAGE_SIZE, RAGGED_Q):
        self.lens_ptr = lens_ptr
        self.last_ptr = last_ptr
        self.ids_ptr = ids_ptr
        self.ids_stride = ids_stride
        self.qo_ptr = qo_ptr
        self.q_len = q_len
        self.batch = batch
        self.KIND = gl.constexpr(KIND)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.RAGGED_Q = gl.constexpr(RAGGED_Q)

    @gluon.jit
    def kv_lens(self, b):
        """Keys of the sequences ``b`` (a tensor of indices); 0 where b >= batch."""
        ok = b < self.batch
        if self.KIND == BLOCK_TABLE:
            n = gl.load(self.lens_ptr + b, mask=ok, other=0)
        else:
            n = gl.load(self.lens_ptr + b + 1, mask=ok, other=0) - gl.load(self.lens_ptr + b, mask=ok, other=0)
            if self.KIND == CSR and self.PAGE_SIZE > 1:
                tail = gl.load(self.last_ptr + b, mask=ok, other=0)
                n = gl.where(n > 0, (n - 1) * self.PAGE_SIZE + tail, 0)
        return n

    @gluon.jit
    def sequence(self, b):
        """(kv_len, first_id) of sequence ``b`` (a scalar). ``first_id`` is its offset in ids, or its first token."""
        if self.KIND == BLOCK_TABLE:
            kv_len = gl.load(self.lens_ptr + b)
            first_id = b.to(gl.int64) * self.ids_stride
        else:
            first = gl.load(self.lens_ptr + b)
            kv_len = gl.load(self.lens_ptr + b + 1) - first
            if self.KIND == CSR and self.PAGE_SIZE > 1:
                tail = gl.load(self.last_ptr + b)
                if kv_len > 0:
                    kv_len = (kv_len - 1) * self.PAGE_SIZE + tail
            first_id = first.to(gl.int64)
        return kv_len, first_id

    @gluon.jit
    def query(self, b):
        """(first query token, query tokens) of sequence ``b``."""
        if self.RAGGED_Q:
            first = gl.load(self.qo_ptr + b)
            count = gl.load(self.qo_ptr + b + 1) - first
        else:
            first = b * self.q_len
            count = self.q_len
        return first, count

    @gluon.jit
    def place(self, first_id, token):
        """(page, row in the page) of one token (scalar), for a tensor-map coordinate."""
        if self.KIND == CONTIGUOUS:
            page = 0
            row = first_id.to(gl.int32) + token
        else:
            page = gl.load(self.ids_ptr + first_id + token // self.PAGE_SIZE)
            row = token % self.PAGE_SIZE
        return page, row

    @gluon.jit
    def row_pages(self, first_id, token, valid):
        """Page ids of a tensor of tokens; ids of tokens that are not ``valid`` are not read."""
        if self.KIND == CONTIGUOUS:
            page = token * 0
        else:
            page = gl.load(self.ids_ptr + first_id + token // self.PAGE_SIZE, mask=valid, other=0)
        return page

    @gluon.jit
    def places_of(self, page, first_id, token, page_stride, token_stride):
        """Element offsets (int64) of a tensor of tokens in the pages that :meth:`row_pages` gave; of no use past the end."""
        if self.KIND == CONTIGUOUS:
            offset = (first_id + token) * token_stride
        else:
            offset = page.to(gl.int64) * page_stride
            if self.PAGE_SIZE > 1:
                offset += (token % self.PAGE_SIZE) * token_stride
        return offset

    @gluon.jit
    def offsets(self, page, first_id, token, valid, page_stride, token_stride):
        """:meth:`places_of`, and 0 where not ``valid``."""
        return gl.where(valid, self.places_of(page, first_id, token, page_stride, token_stride), 0)

    @gluon.jit
    def prefetch_ids(self, worker, workers):
        """Bring the page ids that this worker would need if all sequences were as long to L2; a wrong guess costs nothing."""
        worker = gl.minimum(worker, workers)  # with fixed splits a worker is a sequence's split, and the product could overflow
        if self.KIND == BLOCK_TABLE:
            at = gl.minimum(worker * self.batch // workers, self.batch - 1).to(gl.int64) * self.ids_stride
        else:
            at = gl.minimum(worker.to(gl.int64) * self.ids_stride // workers, self.ids_stride)
        if self.KIND != CONTIGUOUS:
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(self.ids_ptr + at).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
            )
