#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda.h"
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

// What the threads of the host share: the devices' memory, and how many have access.
struct Memory {
  struct Region {
    std::size_t bytes;
    int device;
  };
  std::mutex mutex;
  std::map<void*, Region> regions;
  std::array<unsigned, devices> users{};
  std::set<int> opened;

  void allow(int device, int protection) {
    for (auto const& [start, region] : regions) {
      if (region.device == device) mprotect(start, region.bytes, protection);
    }
  }
};
Memory memory;
std::atomic<int> allocations_left = -1;  // until one fails; below 0: none does

// Of a thread of the host.
thread_local int chosen_device = 0;
thread_local std::vector<int> pushed_devices;
thread_local cudaError_t last_error = cudaSuccess;

// A context is its device's number, and one.
CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
}
CUresult get_device(CUdevice* handle, int device) {
  *handle = device;
  return CUDA_SUCCESS;
}
CUresult retain(CUcontext* context, CUdevice device) {
  std::lock_guard const lock(memory.mutex);
  memory.opened.insert(device);
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult push_context(CUcontext context) {
  pushed_devices.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}
CUresult pop_context(CUcontext* context) {
  if (pushed_devices.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = context_of(pushed_devices.back());
  pushed_devices.pop_back();
  return CUDA_SUCCESS;
}

}  // namespace

void* allocate(std::size_t bytes) {
  Access const access;
  std::lock_guard const lock(memory.mutex);
  void* const start =
      mmap(nullptr, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  memory.regions.insert_or_assign(start, Memory::Region{bytes + 1, device()});
  return start;
}

void release(void* start) {
  std::lock_guard const lock(memory.mutex);
  auto const found = memory.regions.extract(start);
  munmap(start, found.mapped().bytes);
}

Access::Access() : device_(device()) {
  std::lock_guard const lock(memory.mutex);
  memory.opened.insert(device_);
  if (memory.users[device_]++ == 0) memory.allow(device_, PROT_READ | PROT_WRITE);
}
Access::~Access() {
  std::lock_guard const lock(memory.mutex);
  if (--memory.users[device_] == 0) memory.allow(device_, PROT_NONE);
}

std::set<int> opened() {
  std::lock_guard const lock(memory.mutex);
  return memory.opened;
}
void close_all() {
  std::lock_guard const lock(memory.mutex);
  memory.opened.clear();
}
int device() { return pushed_devices.empty() ? chosen_device : pushed_devices.back(); }
void set_device(int device) {
  chosen_device = device;
  Access const access;  // opens it
}

void fail_allocation(unsigned after) { allocations_left = static_cast<int>(after); }
void fail_none() { allocations_left = -1; }
bool may_allocate() { return allocations_left < 0 || allocations_left-- != 0; }
cudaError_t result(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}
cudaError_t take_last_error() { return std::exchange(last_error, cudaSuccess); }

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

cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  std::string_view const name = symbol;
  *function = name == "cuDeviceGet"                ? reinterpret_cast<void*>(emulator::get_device)
              : name == "cuDevicePrimaryCtxRetain" ? reinterpret_cast<void*>(emulator::retain)
              : name == "cuCtxPushCurrent"         ? reinterpret_cast<void*>(emulator::push_context)
              : name == "cuCtxPopCurrent"          ? reinterpret_cast<void*>(emulator::pop_context)
                                                   : nullptr;
  *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
