"""What a compiled kernel is specialised on, and what it is called with: plain values, no FlyDSL import."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import DIMS, DecodeProblem

__all__ = [
    "COMBINE_ARGS", "COMBINE_THREADS", "DECODE_ARGS", "LDS_LIMIT", "NUM_THREADS", "PLAN_ARGS", "PRECISIONS", "SPLIT_MODES", "TILE", "CombineSpec",
    "DecodeSpec", "LdsLayout", "PlanSpec", "row_tiles_for",
]  # fmt: skip

TILE = 64  #: keys a tile
NUM_WAVES = 4
NUM_THREADS = 64 * NUM_WAVES
COMBINE_THREADS = 128  #: of the combine kernel: one (row, head), 4 dims each
LDS_LIMIT = 163840  #: bytes of LDS a compute unit of gfx950 has

#: A row of a tile in LDS: 576 bf16 and 16 bytes of padding. 1168 bytes are 36 banks modulo 64, so the 16 rows that a
#: ds_read_b128 touches start in 16 different groups of 4 banks, and so do the 4 rows of a transposed read.
ROW_BYTES = 2 * DIMS.qk_head_dim + 16

#: Arguments of each kernel in order: (name, kind, meaning). Addresses and strides are 8 bytes, all before the 4-byte ones,
#: so that packing in order needs no padding.
DECODE_ARGS: tuple[tuple[str, str, str], ...] = (
    ("q", "i64", "address of q [total_q, num_heads, 576] bf16"),
    ("kv", "i64", "address of the cache data [pages, page_size, bytes of a token]"),
    ("kv_scale", "i64", "address of: fp8 fp32 [1]; mxfp4 E8M0 bytes [pages, page_size, 18]; otherwise 0"),
    ("page_ids", "i64", "address of int32 page ids: csr [n], block_table [batch, width]; contiguous 0"),
    ("kv_indptr", "i64", "address of int32 [batch+1]: csr pages, contiguous tokens; block_table 0"),
    ("kv_lens", "i64", "address of int32 [batch]: csr last page lengths, block_table cache_seqlens; contiguous 0"),
    ("qo_indptr", "i64", "address of int32 [batch+1] query row offsets; 0 if uniform"),
    ("zeros", "i64", "address of 1152 zero bytes, 16-byte aligned: stands in for rows past the last key"),
    ("items", "i64", "planned: address of int32 [max_items], sequence of each item; otherwise 0"),
    ("first_item", "i64", "planned: address of int32 [batch], first item of each sequence; otherwise 0"),
    ("split_counts", "i64", "planned: address of int32 [batch], items of each sequence; otherwise 0"),
    ("num_items", "i64", "planned: address of int32 [1], items in all; otherwise 0"),
    ("out", "i64", "address of out [total_q, num_heads, 512] bf16"),
    ("lse", "i64", "address of lse fp32 [total_q, num_heads], or 0"),
    ("partial_out", "i64", "address of fp32 [max_items, row_capacity, 512]; unused if not split"),
    ("partial_lse", "i64", "address of fp32 [max_items, row_capacity], natural log; unused if not split"),
    ("kv_page_stride", "i64", "bytes between pages of the cache (between tokens if contiguous)"),
    ("kv_token_stride", "i64", "bytes between tokens of a page"),
    ("scale_page_stride", "i64", "mxfp4: bytes between pages of the scales"),
    ("scale_token_stride", "i64", "mxfp4: bytes between tokens of the scales"),
    ("q_row_stride", "i64", "bytes between query rows"),
    ("q_head_stride", "i64", "bytes between heads of q"),
    ("out_row_stride", "i64", "bytes between rows of out"),
    ("out_head_stride", "i64", "bytes between heads of out"),
    ("max_items", "i32", "items the grid has room for: grid = row blocks * max_items"),
    ("row_capacity", "i32", "rows (query row, head) of a sequence that partial results have room for"),
    ("total_q", "i32", "query rows over all sequences"),
    ("q_len", "i32", "query rows a sequence if uniform"),
    ("table_stride", "i32", "block_table: page ids between rows of the table"),
    ("num_splits", "i32", "split mode 'count': splits of every sequence"),
    ("split_size", "i32", "split mode 'size': keys of a split"),
    ("sm_scale", "f32", "factor on the logits"),
    ("logit_cap", "f32", "cap on the logits; read only by kernels built with a cap"),
    ("reserved", "i32", "0"),
)

COMBINE_ARGS: tuple[tuple[str, str, str], ...] = (
    ("partial_out", "i64", "address of fp32 [max_items, row_capacity, 512]"),
    ("partial_lse", "i64", "address of fp32 [max_items, row_capacity], natural log"),
    ("first_item", "i64", "planned: address of int32 [batch], first item of each sequence; otherwise 0"),
    ("split_counts", "i64", "planned: address of int32 [batch], items of each sequence; otherwise 0"),
    ("qo_indptr", "i64", "address of int32 [batch+1] query row offsets; 0 if uniform"),
    ("out", "i64", "address of out [total_q, num_heads, 512] bf16"),
    ("lse", "i64", "address of lse fp32 [total_q, num_heads], or 0"),
    ("out_row_stride", "i64", "bytes between rows of out"),
    ("out_head_stride", "i64", "bytes between heads of out"),
    ("max_rows", "i32", "most rows (query row, head) of a sequence: grid = batch * max_rows"),
    ("row_capacity", "i32", "rows of a sequence that partial results have room for"),
    ("q_len", "i32", "query rows a sequence if uniform"),
    ("num_splits", "i32", "split mode 'count': splits of every sequence"),
)

PLAN_ARGS: tuple[tuple[str, str, str], ...] = (
    ("kv_indptr", "i64", "as in the decode kernel"),
    ("kv_lens", "i64", "as in the decode kernel"),
    ("items", "i64", "address of int32 [max_items] to write"),
    ("first_item", "i64", "address of int32 [batch] to write"),
    ("split_counts", "i64", "address of int32 [batch] to write"),
    ("num_items", "i64", "address of int32 [1] to write"),
    ("batch", "i32", "sequences"),
    ("num_workers", "i32", "items that run at the same time"),
    ("split_size", "i32", "split mode 'size': keys of a split"),
    ("fan_log2", "i32", "log2 of the threads that write one sequence's items: 256 / fan >= min(batch, 256)"),
)

#: What a query value is while it is multiplied. "16bit": bf16, exactly. "a8" (fp8 caches): e4m3 with a power of two for each 32
#: values; errors of 2.5e-2 instead of 2e-3, so only where it is asked for.
PRECISIONS = ("16bit", "a8")

#: "one": not split. "count": exactly num_splits. "balanced", "size": what plan.py wrote into the item table.
SPLIT_MODES = ("one", "count", "balanced", "size")


@dataclass(frozen=True, slots=True)
class LdsLayout:
    """Byte offsets of what a block keeps in LDS."""

    keys: int
    probabilities: int
    maxima: int
    scales: int  #: fp8_tile128: fp32 [4 tiles of 128 values][TILE keys]
    size: int


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """Constants a decode kernel is compiled for."""

    format: str
    num_heads: int
    row_tiles: int  #: groups of 16 (query row, head) pairs a block works on: 1, 2 or 4
    table_kind: str
    page_size: int
    causal: bool
    ragged_q: bool
    has_cap: bool
    split_mode: str  #: one of SPLIT_MODES
    precision: str = "16bit"  #: one of PRECISIONS

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        flags = ("_causal" if self.causal else "") + ("_ragged" if self.ragged_q else "") + ("_cap" if self.has_cap else "")
        flags += "_a8" if self.precision == "a8" else ""
        pages = "contiguous" if self.table_kind == "contiguous" else f"{self.table_kind}{self.page_size}"
        return f"mla_decode_{self.format}_h{self.num_heads}_r{16 * self.row_tiles}_{pages}_{self.split_mode}{flags}"

    @property
    def scaled_scores(self) -> bool:
        """Whether scores multiply the keys' own bytes (scaled.py) instead of bf16 from LDS.

        Only for 16 rows: more would have several waves load the same keys.
        """
        return self.row_tiles == 1 and (self.format == "mxfp4" or self.precision == "a8")

    @property
    def query_terms(self) -> int:
        """e4m3 numbers that make a query value where scores multiply bytes: two hold a bf16 exactly, one is a8."""
        return 1 if self.precision == "a8" else 2

    @property
    def tile_scales(self) -> bool:
        """Whether a key has an fp32 scale for each 128 of its latent values (fp8_tile128)."""
        return self.format == "fp8_tile128"

    @property
    def probability_bytes(self) -> int:
        """Bytes a probability takes in LDS: 4 where it is still to be multiplied by a key's scale, so that it is rounded once."""
        return 4 if self.tile_scales else 2

    @property
    def hides_keys(self) -> bool:
        """Whether rows of one block may differ in the keys they see, because the block spans several query rows."""
        return self.causal and self.num_heads % self.rows != 0

    @property
    def planned(self) -> bool:
        """Whether the plan kernel runs first."""
        return self.split_mode in ("balanced", "size")

    @property
    def rows(self) -> int:
        """(query row, head) pairs a block."""
        return 16 * self.row_tiles

    @property
    def key_groups(self) -> int:
        """Waves that share a row tile and divide the keys of a tile among them."""
        return NUM_WAVES // self.row_tiles

    @property
    def tile_in_page(self) -> bool:
        """Whether all keys of a tile lie in one page: tiles begin at multiples of 64 keys unless splits have a fixed size."""
        return self.table_kind != "contiguous" and self.page_size % TILE == 0 and self.split_mode != "size"

    @property
    def blocks_per_cu(self) -> int:
        """Blocks that fit a compute unit, by LDS (160 KiB) and registers (512 a lane, shared by resident waves).

        64 rows take 83 KB of LDS and 350 registers. 32 rows of a bf16 cache fit by LDS but not by registers: 72 of q,
        72 of the next tile and 64 of accumulators leave too few of 256, so held to that they would spill. 32 rows of fp8_tile128
        fit by neither: 84 KB, since its probabilities take 4 bytes.
        """
        return 1 if self.row_tiles == 4 or (self.row_tiles == 2 and self.format in ("bf16", "fp8_tile128")) else 2

    @property
    def lds(self) -> LdsLayout:
        keys = 0
        probabilities = keys + TILE * ROW_BYTES
        maxima = probabilities + self.row_tiles * 16 * TILE * self.probability_bytes
        scales = maxima + 16 * NUM_WAVES * 4
        return LdsLayout(keys, probabilities, maxima, scales, scales + (4 * 4 * TILE if self.tile_scales else 0))

    @classmethod
    def for_problem(cls, problem: DecodeProblem, split_mode: str, precision: str = "16bit") -> DecodeSpec:
        """The kernel that runs ``problem``. a8 works on 16 rows a block; more rows are more blocks, which share keys through L2."""
        return cls(
            format=problem.format,
            num_heads=problem.num_heads,
            row_tiles=1 if precision == "a8" else row_tiles_for(problem.num_heads * problem.max_q_len),
            table_kind=problem.table_kind,
            page_size=problem.page_size,
            causal=problem.causal and problem.max_q_len > 1,
            ragged_q=problem.ragged_q,
            has_cap=problem.logit_cap > 0,
            split_mode=split_mode,
            precision=precision,
        )


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """Constants a combine kernel is compiled for."""

    num_heads: int
    ragged_q: bool
    planned: bool

    @property
    def name(self) -> str:
        return f"mla_combine_h{self.num_heads}" + ("_ragged" if self.ragged_q else "") + ("_planned" if self.planned else "")


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """Constants a plan kernel is compiled for."""

    table_kind: str
    page_size: int
    split_mode: str

    @property
    def name(self) -> str:
        pages = "contiguous" if self.table_kind == "contiguous" else f"{self.table_kind}{self.page_size}"
        return f"mla_plan_{pages}_{self.split_mode}"


def row_tiles_for(rows: int) -> int:
    """Row tiles a block for ``rows`` (query row, head) pairs a sequence: as many as share a tile of keys usefully.

    16 rows: 1 (no padding); 17..32: 2; more: 4, and several blocks where there are more than 64 rows.
    """
    return 1 if rows <= 16 else 2 if rows <= 32 else 4
