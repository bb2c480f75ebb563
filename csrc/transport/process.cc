#include "transport/process.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/error.h"

namespace sparsecomm {
namespace {

// When the process started, and nothing where there is none or only its exit status is left.
std::optional<std::uint64_t> start_of(std::uint64_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The second field is the program's name in parentheses, which may hold blanks and parentheses.
  std::istringstream fields(line.substr(std::min(line.rfind(')') + 1, line.size())));
  char state = 'X';
  std::string skipped;
  std::uint64_t started = 0;
  fields >> state;
  for (int field = 4; field <= 21; ++field) fields >> skipped;
  fields >> started;
  if (!fields || state == 'Z' || state == 'X') return std::nullopt;
  return started;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (open()) ::close(value_);
}

ProcessIdentity ProcessIdentity::own() {
  ProcessIdentity identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity.host;
  struct stat names{};
  if (::stat("/proc/self/ns/pid", &names) == 0) identity.host += concat('/', names.st_ino);
  if (identity.host.empty()) identity.host = "unknown";
  identity.pid = static_cast<std::uint64_t>(::getpid());
  identity.started = start_of(identity.pid).value_or(0);
  return identity;
}

std::string ProcessIdentity::text() const { return concat(host, ' ', pid, ' ', started); }

std::optional<ProcessIdentity> ProcessIdentity::parse(std::string const& text) {
  ProcessIdentity identity;
  std::istringstream in(text);
  in >> identity.host >> identity.pid >> identity.started;
  if (!in || !in.eof()) return std::nullopt;
  return identity;
}

std::string descriptor_problem(std::size_t more) {
  struct rlimit limit{};
  std::error_code error;
  std::filesystem::directory_iterator const files("/proc/self/fd", error);
  if (error || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  auto const open = static_cast<std::size_t>(std::distance(begin(files), end(files)));
  std::size_t const needed = open + more;
  if (needed <= limit.rlim_cur) return {};
  return concat("it needs ", needed, " file descriptors, ", open,
                " of which are open, and may have ", limit.rlim_cur,
                "; raise the limit: ulimit -n ", needed,
                needed <= limit.rlim_max
                    ? std::string()
                    : concat(", once an administrator has raised the hard one, ", limit.rlim_max,
                             " (limits.conf, LimitNOFILE, docker --ulimit nofile)"));
}

FileDescriptor watch_process(ProcessIdentity const& process) {
  ProcessIdentity const own = ProcessIdentity::own();
  if (!process.same_host(own) || process.pid == own.pid) return FileDescriptor();
#ifdef SYS_pidfd_open
  FileDescriptor file(
      static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(process.pid), 0)));
  // Opened first and looked at then: what is watched is the process that was meant.
  if (file.open() && start_of(process.pid) == process.started) return file;
#endif
  return FileDescriptor();
}

bool has_ended(ProcessIdentity const& process) { return start_of(process.pid) != process.started; }

}  // namespace sparsecomm
