#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {
namespace {

constexpr std::size_t stack_bytes = 64 * 1024;
constexpr std::size_t shared_bytes = 48 * 1024;  // what every device has
constexpr unsigned lanes = 32;

struct Warp {
  std::array<std::array<std::uint64_t, lanes>, 2> values;
  unsigned arrived = 0;
  std::uint64_t round = 0;
};

struct Block {
  std::vector<Warp> warps;
  std::unique_ptr<std::byte[]> shared;
  unsigned arrived = 0;
  std::uint64_t round = 0;
  unsigned running = 0;
};

struct Fibre {
  Thread thread;
  Block* block = nullptr;
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<std::byte[]> stack;
  bool started = false;
  bool ended = false;
};

// Of a thread of the host, as ranks may be threads.
struct Machine {
  std::mt19937_64 random{1};
  unsigned resident = 3;
  Fibre* current = nullptr;
  ucontext_t context;
  jmp_buf place;
  std::function<void()> const* kernel = nullptr;
  std::exception_ptr error;
  std::uint64_t steps = 0;  // anything that somebody may have waited for
  std::vector<std::unique_ptr<std::byte[]>> stacks;
};
thread_local Machine machine;

void enter() {
  Machine& here = machine;
  try {
    (*here.kernel)();
  } catch (...) {
    here.error = std::current_exception();
  }
  here.current->ended = true;
  --here.current->block->running;
  ++here.steps;
  _longjmp(here.place, 1);
}

void go_on(Fibre& fibre) {
  machine.current = &fibre;
  if (_setjmp(machine.place) == 0) {
    if (fibre.started) _longjmp(fibre.place, 1);
    fibre.started = true;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = stack_bytes;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
    setcontext(&fibre.context);
  }
  machine.current = nullptr;
}

// What the threads of the host share: the device's memory, and how many have access.
struct Memory {
  std::mutex mutex;
  std::map<void*, std::size_t> regions;
  unsigned users = 0;

  void allow(int protection) {
    for (auto const& [region, bytes] : regions) mprotect(region, bytes, protection);
  }
};
Memory memory;

}  // namespace

void* allocate(std::size_t bytes) {
  std::lock_guard const lock(memory.mutex);
  void* const region =
      mmap(nullptr, bytes + 1, memory.users > 0 ? PROT_READ | PROT_WRITE : PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) return nullptr;
  memory.regions.emplace(region, bytes + 1);
  return region;
}

void release(void* region) {
  std::lock_guard const lock(memory.mutex);
  auto const found = memory.regions.extract(region);
  munmap(region, found.mapped());
}

Access::Access() {
  std::lock_guard const lock(memory.mutex);
  if (memory.users++ == 0) memory.allow(PROT_READ | PROT_WRITE);
}
Access::~Access() {
  std::lock_guard const lock(memory.mutex);
  if (--memory.users == 0) memory.allow(PROT_NONE);
}

void configure(std::uint64_t seed, unsigned resident) {
  machine.random.seed(seed);
  machine.resident = resident;
}

Thread const& current() { return machine.current->thread; }
void* shared_memory(std::size_t bytes) {
  if (bytes > shared_bytes) throw std::logic_error("more shared memory than every device has");
  return machine.current->block->shared.get();
}

void yield() {
  Fibre& fibre = *machine.current;
  if (_setjmp(fibre.place) == 0) _longjmp(machine.place, 1);
}

void synchronize_block() {
  Block& block = *machine.current->block;
  std::uint64_t const round = block.round;
  if (++block.arrived == machine.current->thread.threads.x) {
    block.arrived = 0;
    ++block.round;
    ++machine.steps;
  }
  while (block.round == round) yield();
}

std::uint64_t const* exchange(std::uint64_t value) {
  Fibre const& fibre = *machine.current;
  Warp& warp = fibre.block->warps[fibre.thread.thread.x / lanes];
  std::uint64_t const round = warp.round;
  warp.values[round % 2][fibre.thread.thread.x % lanes] = value;
  if (++warp.arrived == lanes) {
    warp.arrived = 0;
    ++warp.round;
    ++machine.steps;
  }
  while (warp.round == round) yield();
  return warp.values[round % 2].data();
}

void run(unsigned blocks, unsigned threads, cudaStream_t, std::function<void()> const& kernel) {
  Access const access;
  Machine& here = machine;
  here.kernel = &kernel;
  here.error = nullptr;
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<std::unique_ptr<Fibre>> fibres;
  unsigned next = 0;
  std::uint64_t idle_rounds = 0;
  while (next < blocks || !fibres.empty()) {
    while (next < blocks && resident.size() < here.resident) {
      auto block = std::make_unique<Block>();
      block->warps.resize((threads + lanes - 1) / lanes);
      block->shared = std::make_unique_for_overwrite<std::byte[]>(shared_bytes);
      std::memset(block->shared.get(), 0xa5, shared_bytes);
      block->running = threads;
      for (unsigned t = 0; t < threads; ++t) {
        auto fibre = std::make_unique<Fibre>();
        fibre->thread = {{t}, {next}, {threads}, {blocks}};
        fibre->block = block.get();
        if (here.stacks.empty()) {
          fibre->stack = std::make_unique_for_overwrite<std::byte[]>(stack_bytes);
        } else {
          fibre->stack = std::move(here.stacks.back());
          here.stacks.pop_back();
        }
        fibres.push_back(std::move(fibre));
      }
      resident.push_back(std::move(block));
      ++next;
    }
    // One round: every fibre once, from a random one on, in a random direction and stride.
    std::uint64_t const before = here.steps;
    std::size_t const count = fibres.size();
    std::size_t const start = here.random() % count;
    bool const backwards = here.random() % 2 == 1;
    for (std::size_t i = 0; i < count; ++i) {
      Fibre& fibre = *fibres[(start + (backwards ? count - i : i)) % count];
      // Some are left behind, so that blocks and warps come in any order.
      if (fibre.ended || here.random() % 8 == 0) continue;
      go_on(fibre);
      if (here.error) std::rethrow_exception(here.error);
    }
    idle_rounds = here.steps == before ? idle_rounds + 1 : 0;
    if (idle_rounds > 1000) {
      throw std::logic_error("threads wait for others that have ended, or do not come");
    }
    std::erase_if(fibres, [&](auto& fibre) {
      if (fibre->ended) here.stacks.push_back(std::move(fibre->stack));
      return fibre->ended;
    });
    std::erase_if(resident, [](auto const& block) { return block->running == 0; });
  }
}

}  // namespace emulator
