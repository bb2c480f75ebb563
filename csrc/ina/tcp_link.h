// Connections to aggregators over TCP, and UCX beside it.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/clock.h"
#include "ina/host.h"
#include "ina/link.h"
#include "ina/message_path.h"

namespace sparsecomm {

// Connects to each aggregator, "HOST:PORT", and joins the job there. Throws AddressError, naming
// the first that does not answer within the deadline, is no aggregator of this release, or does not
// take the worker, with its reason, or TransportUnavailable if messages are to go over UCX, which
// cannot be used here.
std::shared_ptr<AggregatorLink> connect_aggregators(std::span<const std::string> addresses,
                                                    JobMember const& member,
                                                    Deadline const& deadline,
                                                    MessageOptions const& options = {});

}  // namespace sparsecomm
