// The transport over UCX (libucp): shared memory within a host, TCP or RDMA between hosts.
//
// The library is opened when the first transport is made, so that nothing needs it to be installed;
// the process's environment, its signal handlers and its C library are then as they were before.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/rendezvous.h"
#include "transport/transport.h"

namespace sparsecomm {

struct UcxOptions {
  std::string library;  // the file to open, and no other; empty: the system's first,
  std::vector<std::string> alternatives;  // then these
  // UCX's settings, named without "UCX_". `settings` go before our defaults, and neither touches
  // those in `reserved`, which the user has made in the environment, where UCX reads them.
  std::vector<std::pair<std::string, std::string>> settings;
  std::vector<std::string> reserved;
  // For the connections, once all ranks have come; by default it grows with their number.
  std::optional<Duration> connect_timeout;
  // How long wait() polls before it sleeps. More than it takes two ranks to wake each other, or
  // those that slept once would go on sleeping at every message.
  Duration spin = std::chrono::microseconds(200);
};

// Why libucp cannot be used here, and what to do; empty where it can.
std::string ucx_problem(UcxOptions const& options);
// The release and the file in use; throws TransportUnavailable with ucx_problem().
std::string ucx_version(UcxOptions const& options);

// Collective over the `size` ranks of `rendezvous`, which is kept for failure reports. Connects
// each rank with the 2 log2 P that stand 2^i before and behind it, over which the ranks tell each
// other how to reach them; all others connect with their first message. Throws
// TransportUnavailable, on every rank with the same text, where the library is missing or of
// different releases, a rank may not open that many files, or those ranks cannot reach each other
// within options.connect_timeout.
std::unique_ptr<Transport> make_ucx_transport(int rank, int size,
                                              std::shared_ptr<Rendezvous> rendezvous,
                                              UcxOptions const& options);

// One-way times in seconds of `rounds` ping-pongs of `bytes` between two ranks on bare libucp, set
// up as the transport is but without its requests, deadlines and sleeping: what the transport's own
// are measured against. Collective over two ranks; throws like make_ucx_transport().
std::vector<double> ucx_ping_pong(int rank, Rendezvous& rendezvous, UcxOptions const& options,
                                  std::size_t bytes, int rounds);

}  // namespace sparsecomm
