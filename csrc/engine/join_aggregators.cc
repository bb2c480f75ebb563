#include "engine/join_aggregators.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <string_view>

namespace sparsecomm {
namespace {

std::string text_of(std::vector<std::string> const& addresses) {
  std::string text = "aggregators=";
  for (std::string const& address : addresses) {
    text += concat(&address == &addresses.front() ? "" : ", ", address);
  }
  return text;
}

// Unlike those of other groups of ranks.
JobId draw_job() {
  std::random_device device;
  auto const draw = [&] { return std::uint64_t{device()} << 32 | device(); };
  return {draw(), draw()};
}

}  // namespace

JoinAggregators::JoinAggregators(AggregatorAddresses const& given)
    : link_(make_tcp_link(given.addresses, given.messages, given.prove)),
      limit_(given.connect_timeout),
      text_(text_of(given.addresses)) {}

Proposal JoinAggregators::prepare() {
  drawn_ = draw_job();
  return {.text = text_, .payload = payload_of(drawn_)};
}

bool JoinAggregators::merge(std::span<std::byte> into, std::span<const std::byte> other) const {
  auto job = read_payload<JobId>(into);
  auto const theirs = read_payload<JobId>(other);
  std::ranges::transform(job, theirs, job.begin(), std::bit_xor());
  std::ranges::copy(payload_of(job), into.begin());
  return true;
}

// Step 2.
JoinAggregators::Problem JoinAggregators::join(Channel& channel, JobId const& job) {
  Problem problem{.rank = channel.size(), .text_bytes = 0, .text = {}};
  try {
    require<Error>(channel.size() <= std::numeric_limits<std::uint16_t>::max(), channel.size(),
                   " ranks, more than a job of aggregators can have");
    auto const waiting = channel.waiting_for("aggregators");
    link_->connect({.job = job,
                    .workers = static_cast<std::uint16_t>(channel.size()),
                    .worker = static_cast<std::uint16_t>(channel.rank())},
                   channel.deadline().within(limit_));
  } catch (PeerError const&) {
    throw;  // interrupted
  } catch (Error const& error) {
    std::string_view const text = std::string_view(error.what()).substr(0, problem.text.size());
    problem.rank = channel.rank();
    problem.text_bytes = static_cast<std::uint32_t>(text.size());
    std::ranges::copy(text, problem.text.begin());
  }
  return problem;
}

void JoinAggregators::run(Channel& channel, Agreement const& agreement) {
  Problem problem = join(channel, read_payload<JobId>(agreement.payload));
  // Step 3.
  problems_.run(
      channel, Phase::threshold, std::span(&problem, 1),
      [](Problem const& a, Problem const& b) { return a.rank <= b.rank ? a : b; },
      [size = channel.size()](std::span<const Problem> arrived, int) {
        for (Problem const& other : arrived) {
          require<MalformedFrame>(
              other.rank >= 0 && other.rank <= size && other.text_bytes <= other.text.size(),
              "joining: rank is ", other.rank, " and text_bytes is ", other.text_bytes,
              ", must be from 0 to ", size, " and at most ", other.text.size());
        }
      });
  if (problem.rank == channel.size()) return;
  std::string const text =
      concat("the aggregators cannot be used: rank ", problem.rank, ": ",
             std::string_view(problem.text.data(), problem.text_bytes),
             "; start what is missing, or give every rank the addresses of others");
  for (int i = 0; i < link_->size(); ++i) link_->close(i, text);
  throw AggregatorsUnavailable(text);
}

std::unique_ptr<JoinAggregators> make_joining(CommunicatorOptions& options, int size) {
  if (options.aggregator_addresses.addresses.empty() || size == 1) return nullptr;
  auto joining = std::make_unique<JoinAggregators>(options.aggregator_addresses);
  options.log_aggregator = options.aggregator_addresses.log;
  options.aggregator_policy = options.aggregator_addresses.policy;
  options.aggregators = joining->link();
  return joining;
}

std::unique_ptr<InaClient> make_client(CommunicatorOptions& options, Transport const& transport,
                                       Interruptibles& interruptibles) {
  if (!options.aggregators) return nullptr;
  interruptibles.push_back(options.aggregators);
  return std::make_unique<InaClient>(std::move(options.aggregators), transport.rank(),
                                     options.aggregator_streams, options.aggregator_patience,
                                     std::move(options.log_aggregator), *options.aggregator_policy);
}

}  // namespace sparsecomm
