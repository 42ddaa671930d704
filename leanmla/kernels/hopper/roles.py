"""How one partition of a block hands a buffer to another, time after time."""

from .gluon_names import aggregate, constexpr_function, gl, gluon, mbarrier, thread_barrier

__all__ = ["Handover", "handover"]


@aggregate
class Handover:
    """A buffer in shared memory between a partition that fills it and one that reads it. Both count its fillings, from 0.

    What a tensor core or a bulk copy will read needs ``fence_async_shared`` before :meth:`give`.
    """

    filled: gl.shared_memory_descriptor  # barriers of one arrival a filling
    read: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, filled, read):
        self.filled = filled
        self.read = read

    @gluon.jit
    def wait_for_room(self, n):
        """The giver, before it writes filling ``n``: until the one before has been read."""
        mbarrier.wait(self.read, (n & 1) ^ 1)

    @gluon.jit
    def give(self):
        """The giver, once it has written."""
        thread_barrier()
        mbarrier.arrive(self.filled, count=1)

    @gluon.jit
    def receive(self, n):
        """The taker: until filling ``n`` is there."""
        mbarrier.wait(self.filled, n & 1)

    @gluon.jit
    def give_back(self):
        """The taker, once all its threads have read: they have met at a barrier since."""
        mbarrier.arrive(self.read, count=1)


@gluon.jit
def handover():
    """A new :class:`Handover`. Its barriers are allocations of their own: two in one would make the compiler separate their uses by
    barriers over the threads."""
    filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(filled, 1)
    mbarrier.init(read, 1)
    return Handover(filled, read)
