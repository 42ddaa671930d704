"""Order of the tests, so that two processes finish at the same time."""

from pathlib import Path

#: Files that take longest, longest first. `make test` gives whole files to processes in the order of collection, and one of these
#: begun last would leave the other process idle.
LONGEST = (
    "triton/test_interpreter.py",
    "flydsl/test_build.py",
    "cpu/test_contest_runner.py",
    "cpu/test_cpu_kernels.py",
    "cpu/test_grid.py",
    "hopper/test_hopper_cuda_compile.py",
    "hopper/test_hopper_cuda_emulated.py",
    "cpu/test_contest_popcorn.py",
    "cpu/test_examples.py",
    "cpu/test_plots.py",
)


def pytest_collection_modifyitems(items):
    """The longest files first, all others as they come."""
    rank = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
