// Connections to aggregators over TCP.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/clock.h"
#include "ina/host.h"
#include "ina/link.h"

namespace sparsecomm {

// Connects to each aggregator, "HOST:PORT", and joins the job there. Throws AddressError, naming
// the first that does not answer within the deadline, is no aggregator of this release, or does not
// take the worker, with its reason.
std::shared_ptr<AggregatorLink> connect_aggregators(std::span<const std::string> addresses,
                                                    JobMember const& member,
                                                    Deadline const& deadline);

}  // namespace sparsecomm
