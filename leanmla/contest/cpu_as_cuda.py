"""Let a submission that says ``device="cuda"`` run on a CPU alone. For a submission's own process only.

:func:`enable` does three things, for the rest of the process:

1. A ``TorchFunctionMode`` sees every torch function and tensor method before it runs and turns "cuda" devices among the
   arguments into the CPU, and ``torch.device("cuda")`` itself: factories (``torch.arange(..., device="cuda")``), ``tensor.to("cuda")``, ``tensor.cuda()``,
   ``new_empty(..., device=...)``, also inside ``with torch.device("cuda")`` and after ``torch.set_default_device``. Pinned
   memory becomes ordinary memory.
2. ``torch.Generator``, which such a mode does not see, is replaced by one that takes "cuda" for the CPU.
3. What ``torch.cuda`` offers around kernels gets stand-ins: ``synchronize``, ``Stream``, ``Event`` (wall clock), ``CUDAGraph``
   and ``graph`` (which record operations and run them again), ``current_device``, memory figures, and so on.

What stays true: ``torch.cuda.is_available()`` is False and tensors say they are on the CPU, so a submission that asks and has
a way without a GPU takes it. What this cannot do: run GPU kernels (Triton, HIP, inline CUDA); those fail and are reported.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["enable"]

_CPU = torch.device("cpu")
_enabled: TorchFunctionMode | None = None


def _is_cuda(x: object) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and (x == "cuda" or x.startswith("cuda:")))


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device and args and _is_cuda(args[0]):
            return _CPU
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "pin_memory" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "record_stream":
            return None
        if any(_is_cuda(a) for a in args):
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        if "device" in kwargs and (_is_cuda(kwargs["device"]) or isinstance(kwargs["device"], int)):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """torch.Generator that takes "cuda" for the CPU."""

    def __new__(cls, device: Any = "cpu"):
        return super().__new__(cls, device=_CPU if _is_cuda(device) else device)  # type: ignore[call-arg]


class _Stream:
    """One queue for all: work on a CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_stream, self.stream_id, self.priority = _CPU, 0, 0, 0

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...


class _Event:
    """A moment of the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: int | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter_ns()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) / 1e6


_recording: _CUDAGraph | None = None


class _Recorder(TorchDispatchMode):
    """Runs operations and notes them down in a graph."""

    def __init__(self, graph: _CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._graph.steps.append(functools.partial(_again, func, args, kwargs, result))
        return result


def _again(func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    """Run an operation once more and put what it makes where the first result lies."""
    fresh = func(*args, **kwargs)
    olds: list[torch.Tensor] = []
    news: list[torch.Tensor] = []
    tree_map(lambda t: olds.append(t) if isinstance(t, torch.Tensor) else None, result)
    tree_map(lambda t: news.append(t) if isinstance(t, torch.Tensor) else None, fresh)
    for old, new in zip(olds, news):
        # Views and in-place results already are where the first result lies.
        if old.data_ptr() != new.data_ptr() and old.numel():
            old.copy_(new)


class _CUDAGraph:
    """Operations noted during a capture, run again by ``replay`` on the same tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steps: list[Callable[[], object]] = []
        self._mode: _Recorder | None = None

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        global _recording
        self.steps.clear()
        self._mode = _Recorder(self)
        self._mode.__enter__()
        _recording = self

    def capture_end(self) -> None:
        global _recording
        _recording = None
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def replay(self) -> None:
        for step in self.steps:
            step()

    def reset(self) -> None:
        self.steps.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def _graph(cuda_graph: _CUDAGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


def _record_backends() -> None:
    """Our CPU backend works on memory directly, unseen by a dispatch mode: note its runs down as a whole."""
    from .. import backends

    load = backends._load

    def loaded(name: str) -> Any:
        backend = load(name)
        run = getattr(backend, "run", None)
        if run is None or hasattr(run, "is_recordable"):
            return backend

        def recordable(args: Any, workspace: object) -> None:
            if _recording is None:
                run(args, workspace)
                return
            graph, mode = _recording, _recording._mode
            graph.steps.append(functools.partial(run, args, workspace))
            assert mode is not None
            mode.__exit__(None, None, None)
            try:
                run(args, workspace)
            finally:
                mode.__enter__()

        recordable.is_recordable = True  # type: ignore[attr-defined]
        # A backend that cannot be changed stays as it is: replays will not include it.
        with contextlib.suppress(AttributeError):
            backend.run = recordable  # type: ignore[union-attr,method-assign]
        return backend

    backends._load = loaded  # type: ignore[assignment]


def _properties(device: Any = None) -> types.SimpleNamespace:
    from ..device import describe

    info = describe("cpu")
    return types.SimpleNamespace(
        name=info.name, major=0, minor=0, multi_processor_count=info.num_sms, total_memory=info.total_memory, L2_cache_size=0,
        gcnArchName="cpu", warp_size=1, shared_memory_per_block=0, shared_memory_per_block_optin=0,
        max_threads_per_multi_processor=1, regs_per_multiprocessor=0,
    )  # fmt: skip


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def enable() -> None:
    """Redirect "cuda" to the CPU for the rest of this process. Harmless when done twice."""
    global _enabled
    if _enabled is not None:
        return
    _record_backends()
    torch.Generator = _Generator  # type: ignore[misc]
    stream = _Stream()
    stand_ins = {
        "is_available": lambda: False,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 0,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": _properties,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": _nothing,
        "device": _nothing,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "CUDAGraph": _CUDAGraph,
        "graph": _graph,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: _recording is not None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (_properties().total_memory,) * 2,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: None)
    torch.cuda.nvtx.range = _nothing
    _enabled = _CudaMeansCpu()
    _enabled.__enter__()
