"""Who reads which keys: the schedule that every block works out for itself at the start of a launch.

The batch is laid out as one line of 64-key blocks, sequence after sequence (an empty sequence counts as one block, so that
somebody writes its output). Workers take equal, contiguous pieces of the line:

    blocks of       | seq 0       | seq 1 | seq 2                 |
    pieces          |   w0   |   w1   |   w2   |   w3   |   w4    |

A *segment* is the part of one sequence inside one piece. A sequence inside one piece is written directly; one that crosses a
border has one partial result a piece, which ``reduction`` merges. A worker has at most two partial results: of its first
segment and of its last. Everything follows from the lengths alone, so results repeat bit for bit, nothing comes from the
host, and a captured graph stays right while lengths change.

The piece is ``ceil(total / workers)`` blocks, rounded up to a multiple of the power of two at most 1/16 of it (at most 6 %
longer): equal power-of-two lengths then cut at sequence borders or at equal places.
    256 x 128 blocks on 132 workers: 249 -> 256, two whole sequences each and no partial result at all.
    64 x 128 blocks on 132 workers: 63 -> 64, every sequence is two equal halves.
Rounding to 1/64 instead was slower for fp8 (311 us against 295 at batch 256, 8192 keys; 95.9 against 92.4 at 64) and no faster
for bf16. One sequence a block, 256 blocks handed out by the hardware, was no faster either (bf16, 560 us against 556).

Where lengths differ, a sequence counts as GAP more blocks, which come before its keys: fetching its query, filling the pipeline
and writing its result take about as long. A cut inside a gap falls on the sequence's beginning, and pieces are not rounded.

``host_plan`` is the same in plain Python.

With a fixed number or size of splits, a worker is one (sequence, split) pair instead.
"""

from .gluon_names import BlockedLayout, aggregate, constexpr_function, gl, gluon
from .host_plan import GAP_BLOCKS
from .pages import BLOCK

__all__ = ["BALANCED", "FIXED_COUNT", "FIXED_SIZE", "Piece", "has_work", "lens_width", "plan_piece", "segment", "split_slots"]

#: Modes of the schedule.
BALANCED, FIXED_COUNT, FIXED_SIZE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
#: What starting a sequence costs, in blocks.
GAP = gl.constexpr(GAP_BLOCKS)


def lens_width(batch: int) -> int:
    """Lengths a warp holds at a time while it adds them up (``LENS`` of :func:`plan_piece`)."""
    return min(512, max(32, 1 << max(batch - 1, 0).bit_length()))


@gluon.jit
def _piece(total, workers, min_blocks, even):
    piece = gl.maximum(gl.maximum(gl.cdiv(total, workers), min_blocks), 1)
    exponent = (piece.to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127  # floor(log2), exact below 2^24
    unit = gl.where(even, 1 << gl.maximum(exponent - 4, 0), 1)
    return gl.cdiv(piece, unit) * unit


@gluon.jit
def _add(a, b):
    return a + b


@aggregate
class Piece:
    """One worker's share: blocks ``start:end`` of the line, of which the first with keys lies in sequence ``b``, whose own first block
    is ``base``."""

    start: gl.tensor
    end: gl.tensor
    b: gl.tensor
    base: gl.tensor
    piece: gl.tensor  # blocks a worker; for fixed modes: splits of the sequence
    worker: gl.tensor  # for fixed modes: the split
    total: gl.tensor  # blocks on the line
    gap: gl.tensor  # blocks that starting a sequence counts as

    @constexpr_function
    def __init__(self, start, end, b, base, piece, worker, total, gap):
        self.start = start
        self.end = end
        self.b = b
        self.base = base
        self.piece = piece
        self.worker = worker
        self.total = total
        self.gap = gap


@gluon.jit
def _blocks(pages, b):
    """Blocks of the sequences ``b``: at least 1, and 0 past the batch."""
    return gl.maximum(gl.cdiv(pages.kv_lens(b), BLOCK), (b < pages.batch).to(gl.int32))


@gluon.jit
def _find(blocks, ok, before, start):
    """Of the sequences in ``blocks``, which follow ``before`` earlier blocks: (how many end by ``start``, where the last of them ends)."""
    upto = before + gl.associative_scan(blocks, 0, _add)
    passed = ok & (upto <= start)
    return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, upto, 0), 0)


@gluon.jit
def plan_piece(pages, worker, workers, splits, MODE: gl.constexpr, LENS: gl.constexpr, ONE_PASS: gl.constexpr):
    """The piece of ``worker`` of ``workers``. ``splits``: fewest blocks a piece, or splits, or blocks a split, by MODE.

    LENS lengths are added up at a time; ONE_PASS says that the batch has no more than that.
    """
    if MODE == BALANCED:
        # Every warp holds the same LENS lengths, so sums and scans need shuffles but no barrier.
        L: gl.constexpr = BlockedLayout([LENS // 32], [32], [gl.num_warps()], [0])
        lane = gl.arange(0, LENS, L)
        if ONE_PASS:
            ok = lane < pages.batch
            blocks = _blocks(pages, lane)
            total = gl.sum(blocks, 0)
            even = gl.max(blocks, 0) == gl.min(gl.where(ok, blocks, 0x7FFFFFFF), 0)
            gap = gl.where(even, 0, GAP)
            total += gap * pages.batch
            piece = _piece(total, workers, splits, even)
            start = gl.minimum(worker * piece, total)
            first, base = _find(gl.where(ok, blocks + gap, 0), ok, 0, start)
        else:
            total = 0
            most = 0
            fewest = 0x7FFFFFFF
            for at in range(0, pages.batch, LENS):
                blocks = _blocks(pages, at + lane)
                total += gl.sum(blocks, 0)
                most = gl.maximum(most, gl.max(blocks, 0))
                fewest = gl.minimum(fewest, gl.min(gl.where(at + lane < pages.batch, blocks, 0x7FFFFFFF), 0))
            even = most == fewest
            gap = gl.where(even, 0, GAP)
            total += gap * pages.batch
            piece = _piece(total, workers, splits, even)
            start = gl.minimum(worker * piece, total)
            first = 0
            base = 0
            before = 0
            for at in range(0, pages.batch, LENS):
                ok = at + lane < pages.batch
                blocks = gl.where(ok, _blocks(pages, at + lane) + gap, 0)
                count, last = _find(blocks, ok, before, start)
                first += count
                base = gl.maximum(base, last)
                before += gl.sum(blocks, 0)
        end = gl.minimum(start + piece, total)
        # a sequence's keys begin behind its gap
        base += gap
        start = gl.maximum(start, base)
    else:
        # worker = sequence * workers_a_sequence + split
        first = worker // workers
        split = worker % workers
        kv_len, _ = pages.sequence(first)
        blocks = gl.cdiv(kv_len, BLOCK)
        if MODE == FIXED_COUNT:
            piece = splits
            start = (split.to(gl.int64) * blocks // piece).to(gl.int32)
            end = ((split + 1).to(gl.int64) * blocks // piece).to(gl.int32)
        else:
            piece = gl.maximum(gl.cdiv(blocks, splits), 1)
            start = split * splits
            end = gl.minimum(start + splits, blocks)
        base = 0
        worker = split
        total = blocks
        gap = 0
    return Piece(start, end, first, base, piece, worker, total, gap)


@gluon.jit
def segment(pages, piece, b, at, base, MODE: gl.constexpr):
    """The part of sequence ``b`` in this piece: (kv_len, first_id, first block, end block, where the keys of the next one begin)."""
    kv_len, first_id = pages.sequence(b)
    blocks = gl.cdiv(kv_len, BLOCK)
    if MODE == BALANCED:
        stop = gl.minimum(piece.end - base, gl.maximum(blocks, 1))
        lo = at - base
        hi = gl.minimum(stop, blocks)
        follow = base + stop + piece.gap
    else:
        lo = piece.start
        hi = piece.end
        follow = at
    return kv_len, first_id, lo, hi, follow


@gluon.jit
def has_work(piece, MODE: gl.constexpr):
    """Whether this worker has a segment at all. An empty split has one: it must be counted in."""
    if MODE == BALANCED:
        more = piece.start < piece.end
    else:
        more = piece.worker < piece.piece
    return more


@gluon.jit
def split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE: gl.constexpr):
    """How sequence ``b`` is shared out: (splits, rank of this worker, ranks that may wait at its end, slot of split 0, slot of split 1,
    slots between later ones).

    In the balanced mode only the last worker of a sequence can have more to do after it; ranks before it have not.
    Balanced: worker w keeps its last segment, if that opens a sequence, in slot 2w+1 and its first, if it goes on with one,
    in slot 2w. ``tiles`` row tiles have their slots side by side.
    """
    if MODE == BALANCED:
        first = base // piece.piece
        stop = base + gl.maximum(gl.cdiv(kv_len, BLOCK), 1)
        splits = (stop - 1) // piece.piece - first + 1
        rank = piece.worker - first
        stay = splits - (stop + piece.gap < gl.minimum((first + splits) * piece.piece, piece.total)).to(gl.int32)
        first_slot = (2 * first + 1) * tiles + tile
        next_slot = (2 * first + 2) * tiles + tile
        step = 2 * tiles
    else:
        splits = piece.piece
        rank = piece.worker
        stay = 0
        first_slot = b * workers * tiles + tile
        next_slot = first_slot + tiles
        step = tiles
    return splits, rank, stay, first_slot, next_slot, step
