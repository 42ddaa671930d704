// Runs a launch of the kernel on the CPU: fibers of a few blocks at a time, taken in turns until all are done. See ptx.cuh.
#include "variant.cu"

inline void __syncthreads() { emulator::meet(emulator::current->block->named[0], THREADS, [] {}); }

namespace {

const Arguments* arguments;

void enter() {
  decode_mxfp4(*arguments);
  emulator::current->done = true;
  _longjmp(emulator::scheduler, 1);
}

using namespace emulator;

void start_block(u32 index, std::vector<std::unique_ptr<Block>>& blocks, std::vector<std::unique_ptr<Fiber>>& fibers) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->shared.assign(BLOCK_SHARED_BYTES + 16, 0xFF);
  block->barriers.resize(block->shared.size() / 8 + 1);
  block->warps.resize(THREADS / 32);
  block->groups.resize(THREADS / 128);
  block->running = THREADS;
  for (u32 t = 0; t < THREADS; t++) {
    auto fiber = std::make_unique<Fiber>();
    constexpr size_t STACK = 48 << 10;
    fiber->block = block.get();
    fiber->thread = t;
    fiber->stack.reset(new char[STACK]);
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack.get();
    fiber->start.uc_stack.ss_size = STACK;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, enter, 0);
    fibers.push_back(std::move(fiber));
  }
  blocks.push_back(std::move(block));
}

bool deliver(Block& block) {  // one of the copies under way, in any order
  if (block.copies.empty() || emulator::random() % 3) return false;
  const size_t pick = emulator::random() % block.copies.size();
  const Copy c = block.copies[pick];
  block.copies.erase(block.copies.begin() + pick);
  memcpy(block.shared.data() + c.to, c.from, c.bytes);
  Barrier& b = block.barriers[c.barrier / 8];
  b.bytes -= c.bytes;
  settle(b);
  return true;
}

void resume(Fiber* fiber) {
  current = fiber;
  if (_setjmp(scheduler)) return;
  if (!fiber->entered) {
    fiber->entered = true;
    setcontext(&fiber->start);
  }
  _longjmp(fiber->at, 1);
}

}  // namespace

// null, or what went wrong
extern "C" const char* emulate(const Arguments* a, u32 blocks_of_grid, u32 at_once, u32 seed, int bits, int q_is_fp16, int has_cap) {
  arguments = a;
  grid = blocks_of_grid;
  random_state = seed;
  sum_bits = bits;
  fp16 = q_is_fp16, cap = has_cap;
  trouble = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  u32 next = 0;
  int idle = 0;
  while (next < grid || !fibers.empty()) {
    while (next < grid && blocks.size() < at_once) start_block(next++, blocks, fibers);
    const u64 before = progress;
    bool moved = false;
    for (auto& f : fibers) {
      if (!f->done) resume(f.get());
      if (f->done) f->block->running--, moved = true;
      if (trouble) return trouble;
    }
    std::erase_if(fibers, [](auto& f) { return f->done; });
    for (auto& b : blocks) moved |= deliver(*b) || !b->copies.empty();
    for (auto& b : blocks)
      if (b->running == 0 && !b->copies.empty()) return "a block ended before its copies did";
    std::erase_if(blocks, [](auto& b) { return b->running == 0; });
    idle = moved || progress != before ? 0 : idle + 1;
    if (idle > 3) return "no thread can go on";
  }
  return nullptr;
}
