#include "engine/join_aggregators.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <random>
#include <string_view>

namespace sparsecomm {
namespace {

std::string text_of(AggregatorLink const& link) {
  std::string text = "aggregators=";
  for (int i = 0; i < link.size(); ++i) text += concat(i == 0 ? "" : ", ", link.address(i));
  return text;
}

}  // namespace

JobId draw_job() {
  std::random_device device;
  auto const draw = [&] { return std::uint64_t{device()} << 32 | device(); };
  return {draw(), draw()};
}

JoinAggregators::JoinAggregators(AggregatorAddresses const& given, int retry)
    : unconnected_(make_tcp_link(given.addresses, given.messages, given.prove)),
      link_(unconnected_),
      limit_(given.connect_timeout),
      text_(text_of(*link_)),
      joined_(false),
      retry_(retry),
      wait_(retry) {}

JoinAggregators::JoinAggregators(std::shared_ptr<AggregatorLink> link, int retry)
    : link_(std::move(link)), text_(text_of(*link_)), joined_(true), retry_(retry), wait_(retry) {}

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

bool JoinAggregators::due(InaClient& client) {
  client_ = &client;
  if (!joined_) return true;
  if (std::popcount(client.left()) == link_->size()) {
    waited_ = 0;
    wait_ = retry_;
    return false;
  }
  return ++waited_ > wait_;
}

JobMember JoinAggregators::member(Channel const& channel) const {
  return {.job = *job_,
          .workers = static_cast<std::uint16_t>(channel.size()),
          .worker = static_cast<std::uint16_t>(channel.rank())};
}

// Step 2.
JoinAggregators::Problem JoinAggregators::join(Channel& channel) {
  Problem problem{.rank = channel.size(), .text_bytes = 0, .text = {}};
  try {
    require<Error>(channel.size() <= std::numeric_limits<std::uint16_t>::max(), channel.size(),
                   " ranks, more than a job of aggregators can have");
    auto const waiting = channel.waiting_for("aggregators");
    unconnected_->connect(member(channel), channel.deadline().within(limit_));
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

// Steps 2 and 3 of those that were lost.
void JoinAggregators::join_again(Channel& channel) {
  waited_ = 0;
  wait_ = std::min(2 * wait_, longest_wait);
  std::uint64_t reached = client_->left();
  {
    auto const waiting = channel.waiting_for("aggregators");
    Deadline const limit = channel.deadline().within(attempt_limit);
    for (int i = 0; i < link_->size(); ++i) {
      std::uint64_t const bit = std::uint64_t{1} << i;
      if ((reached & bit) != 0) continue;
      try {
        link_->reconnect(i, member(channel), limit);
        reached |= bit;
      } catch (PeerError const&) {
        throw;  // interrupted
      } catch (Error const&) {
        // It is as it was.
      }
    }
  }
  std::uint64_t const all = ~std::uint64_t{0} >> (64 - link_->size());
  reached_.run(channel, Phase::threshold, std::span(&reached, 1), std::bit_and(),
               [&](std::span<const std::uint64_t> arrived, int) {
                 for (std::uint64_t const other : arrived) {
                   require<MalformedFrame>((other & ~all) == 0, "joining again: aggregators are ",
                                           other, ", must be among the ", link_->size(),
                                           " that there are");
                 }
               });
  client_->use_again(reached);
}

void JoinAggregators::run(Channel& channel, Agreement const& agreement) {
  if (!joined_ || !job_) job_ = read_payload<JobId>(agreement.payload);
  if (joined_) return join_again(channel);
  Problem problem = join(channel);
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
  joined_ = problem.rank == channel.size();
  if (joined_) return;
  std::string const text =
      concat("the aggregators cannot be used: rank ", problem.rank, ": ",
             std::string_view(problem.text.data(), problem.text_bytes),
             "; start what is missing, or give every rank the addresses of others");
  for (int i = 0; i < link_->size(); ++i) link_->close(i, text);
  throw AggregatorsUnavailable(text);
}

std::unique_ptr<JoinAggregators> make_joining(CommunicatorOptions& options, int size) {
  if (size == 1) return nullptr;
  int const retry = options.aggregator_retry;
  require(retry > 0, "aggregator_retry is ", retry, ", must be 1 or more");
  if (options.aggregator_addresses.addresses.empty()) {
    if (!options.aggregators) return nullptr;
    return std::make_unique<JoinAggregators>(options.aggregators, retry);
  }
  auto joining = std::make_unique<JoinAggregators>(options.aggregator_addresses, retry);
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
