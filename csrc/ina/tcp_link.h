// Connections to aggregators over TCP, and UCX beside it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "ina/greeting.h"
#include "ina/host.h"
#include "ina/link.h"
#include "ina/message_path.h"

namespace sparsecomm {

// Aggregators as users name them.
struct AggregatorAddresses {
  std::vector<std::string> addresses;  // "HOST:PORT", at most 64
  MessageOptions messages;
  Duration connect_timeout = std::chrono::seconds(30);  // of connecting to all of them
  InaPolicy const* policy = &vote_policy;               // theirs
  Prover prove = {};  // for those that ask for a token; empty: there is none
  // Told of each that is lost, once, by the thread that runs an operation.
  std::function<void(std::string const&)> log = {};
};

// Throws InvalidArgument where there is none, or one is not HOST:PORT or comes twice.
void require_addresses(std::span<const std::string> addresses);

// A link that is still to be connected.
class UnconnectedLink : public AggregatorLink {
 public:
  // Connects to each aggregator and joins the job there; again after that has failed or the
  // connections were closed. Throws AddressError, naming the first that does not answer within the
  // deadline, is no aggregator of this release, asks for a token if there is none, or does not take
  // the worker, with its reason;
  // TransportUnavailable if messages are to go over UCX, which cannot be used here; and as next()
  // does.
  virtual void connect(JobMember const& member, Deadline const& deadline) = 0;
};

// Throws as require_addresses().
std::shared_ptr<UnconnectedLink> make_tcp_link(std::span<const std::string> addresses,
                                               MessageOptions const& options = {},
                                               Prover prove = {});

// One that is connected.
std::shared_ptr<AggregatorLink> connect_aggregators(std::span<const std::string> addresses,
                                                    JobMember const& member,
                                                    Deadline const& deadline,
                                                    MessageOptions const& options = {},
                                                    Prover prove = {});

}  // namespace sparsecomm
