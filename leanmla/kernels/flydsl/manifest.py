"""What a launcher that knows nothing of this package needs to run built kernels: tensors, parameters, launches, as JSON.

A problem's launches name their arguments; each argument is one of

- ``constant``: the value, which follows from the problem;
- ``buffer``: the address of a tensor that :func:`buffers` describes (an optional one may be given as address 0);
- ``parameter``: a number of the caller's, such as sm_scale or a stride; strides have the values of contiguous tensors as defaults.

``docs/mi355x.md`` describes the file field by field.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ... import formats
from ...errors import InvalidArgument
from ...problem import DIMS, DecodeProblem
from ...split_plan import CHUNK_CANDIDATES
from .build import ARGUMENT_BYTES, BuiltKernel

__all__ = ["SCHEMA", "Buffer", "Parameter", "buffers", "check_folder", "manifest", "parameters", "write_manifest"]

SCHEMA = "leanmla-build/1"
PACKING = (
    "little-endian; each argument at its offset in a kernarg segment of kernarg_bytes, the rest zero; ptr and i64 take 8 bytes, "
    "i32 and f32 take 4"
)
CAPACITY = (
    "grid and constants serve every step of up to problem.batch sequences of up to problem.max_kv_len keys, lengths as the inputs say: a "
    "smaller batch keeps the buffers' shapes and ends in sequences of 0 keys (block_table: kv_lens 0, page ids anything; csr and "
    "contiguous: kv_indptr repeats its last value), whose rows of out become 0"
)
ORDER = "the launches of a problem in the order they are listed, on one stream: each reads what the one before wrote"
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "uint8": 1}

#: Arguments of the Triton kernels that are called otherwise than the tensor they point to.
_BUFFER_NAMES = {
    "data_ptr": "kv", "scale_ptr": "kv_scale", "kv_last_ptr": "kv_lens", "seqlens_ptr": "kv_lens", "splits_ptr": "split_counts",
    "first_ptr": "first_item",
}  # fmt: skip
#: Names that stand for addresses, whether or not a problem has the tensor.
_TENSORS = frozenset((
    "q", "kv", "kv_scale", "page_ids", "kv_indptr", "kv_lens", "qo_indptr", "out", "lse", "zeros", "items", "first_item", "split_counts",
    "num_items", "factors", "partial_out", "partial_lse",
))  # fmt: skip
#: Table kinds that an argument is read for, where it is not for all that have the tensor.
_READ_FOR = {"kv_last_ptr": "csr", "seqlens_ptr": "block_table"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in device memory whose address some launches take."""

    name: str
    role: str  #: "input" | "output" | "scratch"
    dtype: str
    shape: tuple[int | None, ...]  #: None: as many as the caller has
    meaning: str
    contents: str | tuple[int, ...] | None = None  #: what scratch holds before the first launch: "zeros", values, or anything
    optional: bool = False  #: address 0 leaves it out
    align: int = 16  #: bytes that the address is a multiple of
    below: int | None = None  #: bytes that the tensor has to stay below

    @property
    def num_bytes(self) -> int | None:
        """Bytes, or None if a dimension is the caller's."""
        total = DTYPE_BYTES[self.dtype]
        for n in self.shape:
            if n is None:
                return None
            total *= n
        return total

    def describe(self) -> dict:
        """As a manifest entry."""
        return {
            "name": self.name, "role": self.role, "dtype": self.dtype, "shape": list(self.shape), "bytes": self.num_bytes,
            "contents": list(self.contents) if isinstance(self.contents, tuple) else self.contents, "optional": self.optional,
            "align": self.align, "below": self.below, "meaning": self.meaning,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number the caller passes. ``default`` None: required."""

    name: str
    kind: str
    default: int | float | None
    meaning: str


def _buffer_name(argument: str) -> str:
    return _BUFFER_NAMES.get(argument, argument.removesuffix("_ptr"))


def buffers(kernel: BuiltKernel) -> tuple[Buffer, ...]:
    """The tensors that the launches of a problem take, sized for the problem as a capacity."""
    p = kernel.problem
    used = {_buffer_name(a.name) for k in kernel.launches for a in k.arguments}
    found = (b for b in (*_tensors(p, kernel.language), *_scratch(kernel)) if b.name in used)
    if kernel.small_cache:
        return tuple(dataclasses.replace(b, below=1 << 31) if b.name in ("kv", "kv_scale") else b for b in found)
    return tuple(found)


def _tensors(p: DecodeProblem, language: str) -> list[Buffer]:
    rows = (p.total_q, p.num_heads)
    format = formats.get(p.format)
    kv_dtype = "bf16" if p.format == "bf16" else "uint8"
    tensors = [
        Buffer("q", "input", p.q_dtype, (*rows, DIMS.qk_head_dim), "queries: 512 latent values, then 64 of rope"),
        Buffer("kv", "input", kv_dtype, (None, p.page_size, format.data_width), f"cache: pages of tokens of {format.layout}"),
        Buffer("out", "output", p.q_dtype, (*rows, DIMS.v_head_dim), "every element is written; 0 where a row sees no key"),
    ]
    if p.return_lse or language == "flydsl":
        meaning = "natural log of the sum of e^logit of each row; -inf where it sees no key"
        tensors.append(Buffer("lse", "output", "fp32", rows, meaning, optional=language == "flydsl"))
    if p.format == "fp8":
        tensors.append(Buffer("kv_scale", "input", "fp32", (1,), "value = fp8 * kv_scale"))
    if p.format == "mxfp4":
        meaning = "E8M0 scales, 2^(byte - 127) for 32 values each"
        tensors.append(Buffer("kv_scale", "input", "uint8", (None, p.page_size, 18), meaning))
    if p.ragged_q:
        tensors.append(Buffer("qo_indptr", "input", "int32", (p.batch + 1,), "query row offsets of the sequences", align=4))
    width = -(-p.max_kv_len // p.page_size)
    if p.table_kind == "block_table":
        tensors += [
            Buffer("page_ids", "input", "int32", (p.batch, width), "pages of each sequence; ids past its last page are not read", align=4),
            Buffer("kv_lens", "input", "int32", (p.batch,), "keys of each sequence; 0 is allowed", align=4),
        ]  # fmt: skip
    else:
        unit = "tokens" if p.table_kind == "contiguous" else "pages"
        tensors.append(Buffer("kv_indptr", "input", "int32", (p.batch + 1,), f"offsets of the sequences in {unit}", align=4))
    if p.table_kind == "csr":
        tensors += [
            Buffer("page_ids", "input", "int32", (None,), "pages of the sequences, one after the other", align=4),
            Buffer("kv_lens", "input", "int32", (p.batch,), "keys in the last page of each sequence", align=4),
        ]  # fmt: skip
    return tensors


def _scratch(kernel: BuiltKernel) -> list[Buffer]:
    p = kernel.problem
    scratch = []

    def add(name: str, dtype: str, shape: tuple[int, ...], meaning: str, contents=None) -> None:
        scratch.append(Buffer(name, "scratch", dtype, shape, meaning, contents))

    if kernel.language == "flydsl":
        add("zeros", "uint8", (2048,), "stands in for rows past the last key; nothing writes to it", "zeros")
    if kernel.plan is not None or kernel.language == "triton":
        add("items", "int32", ((2 if kernel.language == "triton" else 1) * kernel.num_items,), "what each work item covers")
        add("first_item", "int32", (max(1, p.batch),), "first work item of each sequence")
        add("split_counts", "int32", (max(1, p.batch),), "work items of each sequence")
        add("num_items", "int32", (1,), "work items in all")
    if kernel.language == "triton":
        add("factors", "int32", (len(CHUNK_CANDIDATES) + 1,), "the planner's candidates, in sixteenths", (*CHUNK_CANDIDATES, 0))
    if kernel.partial_rows:
        add("partial_out", "fp32", (kernel.partial_rows, DIMS.v_head_dim), "output of each split of each row")
        add("partial_lse", "fp32", (kernel.partial_rows,), "lse of each split of each row")
    return scratch


def parameters(kernel: BuiltKernel) -> tuple[Parameter, ...]:
    """The numbers that the launches of a problem take beside constants and addresses."""
    p = kernel.problem
    token = formats.get(p.format).bytes_per_token if p.format != "mxfp4" else 288
    width = -(-p.max_kv_len // p.page_size)
    q_head, q_row = DIMS.qk_head_dim, DIMS.qk_head_dim * p.num_heads
    out_head, out_row = DIMS.v_head_dim, DIMS.v_head_dim * p.num_heads
    defaults: dict[str, int | None] = {
        "sm_scale": None,
        # FlyDSL kernels: bytes
        "kv_page_stride": token * p.page_size, "kv_token_stride": token,
        "scale_page_stride": 18 * p.page_size, "scale_token_stride": 18,
        "q_row_stride": 2 * q_row, "q_head_stride": 2 * q_head, "out_row_stride": 2 * out_row, "out_head_stride": 2 * out_head,
        "table_stride": width,
        # Triton kernels: elements, and units of 16 bytes for pages
        "stride_q_token": q_row, "stride_q_head": q_head, "stride_out_token": out_row, "stride_out_head": out_head,
        "stride_lse_token": p.num_heads, "stride_page": token * p.page_size // 16, "stride_scale_page": 18 * p.page_size,
        "stride_table": width,
    }  # fmt: skip
    found: dict[str, Parameter] = {}
    for launch in kernel.launches:
        for a in launch.arguments:
            if a.name in defaults and a.name not in launch.constants:
                found.setdefault(a.name, Parameter(a.name, a.kind, defaults[a.name], a.meaning))
    return tuple(found.values())


def _launch(launch: BuiltKernel, tensors: Iterable[Buffer], stage: str) -> dict:
    """One launch; every argument has its source."""
    names = {b.name for b in tensors}
    kind = launch.problem.table_kind
    arguments = []
    for a in launch.arguments:
        entry: dict = {"name": a.name, "kind": a.kind, "offset": a.offset, "bytes": ARGUMENT_BYTES[a.kind], "meaning": a.meaning}
        name = _buffer_name(a.name)
        if a.name in launch.constants:
            entry["constant"] = launch.constants[a.name]
        elif name in names and _READ_FOR.get(a.name, kind) == kind:
            entry["buffer"] = name
        elif name in _TENSORS:
            entry["constant"] = 0  # a tensor that this problem does not have; the kernel does not read it
        else:
            entry["parameter"] = a.name
        arguments.append(entry)
    return {
        "stage": stage, "file": launch.file, "name": launch.name, "language": launch.language, "compiler": launch.compiler,
        "target": launch.target, "grid": list(launch.grid), "block": list(launch.block), "lds_bytes": launch.lds_bytes,
        "dynamic_lds_bytes": launch.dynamic_lds_bytes, "wavefront_size": 64, "kernarg_bytes": launch.kernarg_bytes,
        "arguments": arguments, "resources": launch.resources | launch.occupancy,
    }  # fmt: skip


def _stages(kernel: BuiltKernel) -> list[tuple[str, BuiltKernel]]:
    stages = (("plan", kernel.plan), ("decode", kernel), ("combine", kernel.combine))
    return [(name, k) for name, k in stages if k is not None]


def manifest(kernels: Iterable[BuiltKernel]) -> dict:
    """The document for some problems, as :func:`write_manifest` writes it."""
    from ... import __version__

    problems = []
    for kernel in kernels:
        tensors = buffers(kernel)
        problems.append({
            "name": str(kernel.problem), "problem": dataclasses.asdict(kernel.problem), "precision": kernel.precision,
            "buffers": [b.describe() for b in tensors],
            "parameters": [dataclasses.asdict(p) for p in parameters(kernel)],
            "launches": [_launch(k, tensors, stage) for stage, k in _stages(kernel)],
        })  # fmt: skip
    return {"schema": SCHEMA, "leanmla": __version__, "packing": PACKING, "order": ORDER, "capacity": CAPACITY, "problems": problems}


# -- files --------------------------------------------------------------------------------------------------------------


def check_folder(folder: str | Path, option: str = "folder") -> None:
    """Refuse a folder that could not be written in the end, before the work.

    Raises:
        InvalidArgument: a file is in the way, the folder holds something else than an earlier build, or it cannot be made.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{option}: {folder} is a file. Name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_build(folder):
        raise InvalidArgument(f"{option}: {folder} holds files that are not of an earlier build. Name a new or an empty folder.")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise InvalidArgument(f"{option}: the folder {parent} does not exist. Create it first.")
    if not os.access(parent, os.W_OK):
        raise InvalidArgument(f"{option}: the folder {parent} cannot be written to. Choose another place.")


def _is_build(folder: Path) -> bool:
    """Whether a folder holds what :func:`write_manifest` wrote, and nothing else."""
    try:
        document = json.loads((folder / "manifest.json").read_text())
        files = {launch["file"] for p in document["problems"] for launch in p["launches"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return document.get("schema") == SCHEMA and {f.name for f in folder.iterdir()} <= {"manifest.json", *files}


def write_manifest(kernels: Iterable[BuiltKernel], folder: str | Path) -> Path:
    """Write the code objects of some problems and ``manifest.json`` into ``folder``: all of them or, if interrupted, nothing.

    Args:
        kernels: what ``build`` or ``build_triton`` returned, one a problem.
        folder: new, empty, or an earlier build, which is replaced.

    Returns:
        The path of the manifest.

    Raises:
        InvalidArgument: ``folder`` cannot be written or holds something else.
    """
    folder, kernels = Path(folder), list(kernels)
    check_folder(folder)
    place = folder.absolute()
    try:
        _write(kernels, place)
    except OSError as error:
        raise InvalidArgument(f"folder: {folder} cannot be written ({error.strerror}). Choose another place.") from None
    return folder / "manifest.json"


def _write(kernels: list[BuiltKernel], place: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        for kernel in kernels:
            for launch in kernel.launches:
                (temporary / launch.file).write_bytes(launch.hsaco)
        (temporary / "manifest.json").write_text(json.dumps(manifest(kernels), indent=1) + "\n")
        _put_in_place(temporary, place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``; what was there goes only once the new folder stands."""
    if not place.exists() or not any(place.iterdir()):
        os.replace(new, place)  # rename(2) takes the place of an empty folder
        return
    old = new.with_suffix(".old")
    os.replace(place, old)
    try:
        os.replace(new, place)
    except BaseException:
        if not place.exists():
            os.replace(old, place)
        raise
    finally:
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
