"""Overlap with the kernels before and after in the stream (programmatic dependent launch, ``settings.programmatic_launch``).

A block may be set up while the kernel before still runs. It asks L2 for what it will need, then waits for that kernel's end, before
the first value that it uses is read. It lets the kernel after be set up when only the end of its last segment is left.
"""

from .gluon_names import gl, gluon

__all__ = ["let_kernel_after_begin", "wait_for_kernel_before"]


@gluon.jit
def wait_for_kernel_before():
    """Until the kernel before is complete and what it wrote is visible to every thread of this one."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_kernel_after_begin():
    """Blocks of the kernel after may take the room of those that end; their own wait lasts until this kernel is complete."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
