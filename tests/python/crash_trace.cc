// Writes the C frames of a test's rank that a fatal signal ends, which Python's faulthandler does not
// show, and leaves a core file in a folder of its own. To be called before
// faulthandler.enable(), which hands a signal on to the former handler.
#include <execinfo.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <initializer_list>

namespace {

int trace = STDERR_FILENO;
char folder[4096];

// Allocates nothing: the heap may be what is broken.
void handle(int number) {
  void* frames[128];
  constexpr char title[] = "C frames:\n";
  bool const written = ::write(trace, title, sizeof title - 1) > 0;
  ::backtrace_symbols_fd(frames, ::backtrace(frames, 128), written ? trace : STDERR_FILENO);
  rlimit core{};
  if (::getrlimit(RLIMIT_CORE, &core) == 0 && core.rlim_cur > 0) {
    ::mkdir(folder, 0755);
    if (::chdir(folder) != 0) ::_exit(128 + number);  // rather than leave a core file anywhere
  }
  ::raise(number);  // with the default action, since SA_RESETHAND
}

}  // namespace

// `cores`: the folder that is made for the core file.
extern "C" void sparsecomm_trace_crashes(int file, char const* cores) {
  trace = file;
  std::snprintf(folder, sizeof folder, "%s", cores);
  void* frame;
  ::backtrace(&frame, 1);  // loads libgcc, which allocates
  struct sigaction action{};
  action.sa_handler = handle;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER | SA_ONSTACK);
  for (int const number : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV}) {
    ::sigaction(number, &action, nullptr);
  }
}
