#include "transport/ucx_library.h"

#include <dlfcn.h>
#include <strings.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <utility>

namespace sparsecomm {
namespace {

constexpr char const* system_library = "libucp.so.0";
constexpr std::pair<unsigned, unsigned> oldest{1, 13};
constexpr char const* remedy =
    "install UCX 1.13 or newer (pip install libucx-cu13; Debian, Ubuntu: apt-get install libucx0), "
    "or name its libucp.so.0 in SPARSECOMM_UCX_LIBRARY";

// As it is loaded, UCX would rewrite mmap(), brk() and others of the C library to learn of memory
// that is given back, and try that out by moving the end of the heap: what another thread allocates
// just then is lost. Only a registration cache for RDMA needs to know. It listens to nothing but
// the environment, in which the variable stands for as long as that takes.
class MemoryEventsOff {
 public:
  MemoryEventsOff() { ::setenv(variable, "n", 1); }
  ~MemoryEventsOff() { ::unsetenv(variable); }
  MemoryEventsOff(MemoryEventsOff const&) = delete;
  MemoryEventsOff& operator=(MemoryEventsOff const&) = delete;

 private:
  static constexpr char const* variable = "UCX_MEM_EVENTS";
};

void* load(std::string const& file, UcxOptions const& options) {
  static std::mutex one_at_a_time;  // or one would take the variable from under another
  std::lock_guard const lock(one_at_a_time);
  // Local: UCX defines functions of the C library, such as signal().
  constexpr int mode = RTLD_NOW | RTLD_LOCAL;
  if (void* const loaded = ::dlopen(file.c_str(), mode | RTLD_NOLOAD)) return loaded;
  std::optional<MemoryEventsOff> off;
  if (std::ranges::find(options.reserved, "MEM_EVENTS") == options.reserved.end()) off.emplace();
  return ::dlopen(file.c_str(), mode);
}

// Fills `library`, or its `problem`.
void open_file(std::string const& file, UcxOptions const& options, UcxLibrary& library) {
  void* const handle = load(file, options);
  if (handle == nullptr) {
    library.problem = ::dlerror();
    return;
  }
  char const* missing = nullptr;
#define SPARSECOMM_UCX_LOOK_UP(name)                                               \
  library.name = reinterpret_cast<decltype(library.name)>(::dlsym(handle, #name)); \
  if (library.name == nullptr) missing = #name;
  SPARSECOMM_UCX_FUNCTIONS(SPARSECOMM_UCX_LOOK_UP)
#undef SPARSECOMM_UCX_LOOK_UP
  if (library.ucp_get_version != nullptr) {
    std::pair<unsigned, unsigned> version;
    unsigned patch = 0;
    library.ucp_get_version(&version.first, &version.second, &patch);
    library.release = concat(version.first, '.', version.second, '.', patch);
    if (version.first != oldest.first || version < oldest) {
      library.problem = concat(file, " is UCX ", library.release, ", which is not 1.13 or newer");
    }
  }
  if (library.problem.empty() && missing != nullptr) {
    library.problem = concat(file, " has no function ", missing);
  }
  // Which of several: a name alone finds what has been opened before by another.
  Dl_info found{};
  bool const located = library.ucp_get_version != nullptr &&
                       ::dladdr(reinterpret_cast<void*>(library.ucp_get_version), &found) != 0;
  library.file = located ? found.dli_fname : file;
  if (!library.problem.empty()) ::dlclose(handle);
}

}  // namespace

struct SignalHandlersKept::Handlers {
  static constexpr std::array signals{SIGILL, SIGTRAP, SIGABRT, SIGBUS,  SIGFPE,
                                      SIGHUP, SIGINT,  SIGQUIT, SIGSEGV, SIGTERM};
  std::array<struct sigaction, signals.size()> before{};
};

SignalHandlersKept::SignalHandlersKept() : handlers_(std::make_unique<Handlers>()) {
  for (std::size_t i = 0; i < Handlers::signals.size(); ++i) {
    ::sigaction(Handlers::signals[i], nullptr, &handlers_->before[i]);
  }
}

SignalHandlersKept::~SignalHandlersKept() {
  for (std::size_t i = 0; i < Handlers::signals.size(); ++i) {
    ::sigaction(Handlers::signals[i], &handlers_->before[i], nullptr);
  }
}

UcxQuiet::UcxQuiet(UcxLibrary const& library, char const* least) : library_(library) {
  std::array<char, 32> level{};
  if (library.ucs_global_opts_get_value("LOG_LEVEL", level.data(), level.size()) == UCS_OK) {
    level_ = level.data();
  }
  // Whoever wants to see more than warnings is looking for something.
  if (::strcasecmp(level_.c_str(), "warn") == 0)
    library.ucs_global_opts_set_value("LOG_LEVEL", least);
}

UcxQuiet::~UcxQuiet() {
  if (::strcasecmp(level_.c_str(), "warn") == 0)
    library_.ucs_global_opts_set_value("LOG_LEVEL", "WARN");
}

UcxLibrary open_ucx(UcxOptions const& options) {
  SignalHandlersKept const kept;
  std::vector<std::string> files;
  if (options.library.empty()) {
    files.emplace_back(system_library);
    files.insert(files.end(), options.alternatives.begin(), options.alternatives.end());
  } else {
    files.push_back(options.library);
  }
  std::string problems;
  for (std::string const& file : files) {
    UcxLibrary library;
    open_file(file, options, library);
    if (library.problem.empty()) return library;
    problems += concat(problems.empty() ? "" : "; ", library.problem);
  }
  UcxLibrary none;
  none.problem = concat("libucp cannot be opened (", problems, "): ", remedy);
  return none;
}

std::string ucx_problem(UcxOptions const& options) { return open_ucx(options).problem; }

std::string ucx_version(UcxOptions const& options) {
  UcxLibrary const library = open_ucx(options);
  require<TransportUnavailable>(library.problem.empty(), library.problem);
  return concat(library.release, " (", library.file, ')');
}

}  // namespace sparsecomm
