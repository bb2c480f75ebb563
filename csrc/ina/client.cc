#include "ina/client.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

namespace sparsecomm {

InaClient::InaClient(std::shared_ptr<AggregatorLink> link, int rank, int streams, Duration patience,
                     std::function<void(std::string const&)> log, InaPolicy const& policy)
    : link_(std::move(link)),
      rank_(rank),
      streams_each_(streams),
      patience_(patience),
      log_(std::move(log)) {
  require(streams >= 1 && streams <= int(AggregatorLink::most_instances), "streams is ", streams,
          ", must be 1 to ", AggregatorLink::most_instances);
  int const aggregators = link_->size();
  require(aggregators >= 1 && aggregators <= 64, aggregators, " aggregators, must be 1 to 64");
  left_ = ~std::uint64_t{0} >> (64 - aggregators);
  streams_.resize(static_cast<std::size_t>(aggregators) * static_cast<std::size_t>(streams));
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    streams_[i].worker = policy.make_worker();
    streams_[i].aggregator = static_cast<int>(i) / streams;
    streams_[i].instance = static_cast<std::uint32_t>(i) % static_cast<std::uint32_t>(streams);
  }
}

InaClient::Stream& InaClient::stream_of(int aggregator, std::uint32_t instance) {
  return streams_[static_cast<std::size_t>(aggregator * streams_each_) + instance];
}

void InaClient::keep(std::uint64_t aggregators, std::string const& why) {
  for (int i = 0; i < link_->size(); ++i) {
    std::uint64_t const bit = std::uint64_t{1} << i;
    if ((left_ & ~aggregators & bit) != 0) forget(i, why);
  }
  log_losses();
}

void InaClient::use_again(std::uint64_t aggregators) {
  for (int i = 0; i < link_->size(); ++i) {
    std::uint64_t const bit = std::uint64_t{1} << i;
    if ((left_ & bit) != 0) continue;
    if ((aggregators & bit) == 0) {
      link_->close(i, "another rank does not reach it");
      continue;
    }
    left_ |= bit;
    std::string const& address = link_->address(i);
    {
      std::lock_guard const lock(lost_mutex_);
      std::erase_if(lost_, [&](AggregatorLoss const& loss) { return loss.address == address; });
      logged_ = lost_.size();
    }
    log(concat("aggregator ", address, " answers again, and is used"));
  }
}

void InaClient::leave() noexcept {
  left_ = 0;
  for (int i = 0; i < link_->size(); ++i) {
    try {
      link_->close(i, "it failed");
    } catch (std::exception const&) {
      // The link's owner closes it in any case.
    }
  }
}

void InaClient::forget(int aggregator, std::string const& why) {
  left_ &= ~(std::uint64_t{1} << aggregator);
  link_->close(aggregator, why);
  std::lock_guard const lock(lost_mutex_);
  lost_.push_back({.address = link_->address(aggregator), .why = why});
}

void InaClient::log_losses() noexcept {
  int const others = std::popcount(left_);
  for (; logged_ < lost_.size(); ++logged_) {
    auto const& [address, why] = lost_[logged_];
    log(concat("aggregator ", address, " is lost: ", why, "; ",
               others == 0   ? "none is left, and the ranks reduce without aggregators"
               : others == 1 ? "its work goes to the one that is left"
                             : concat("its work goes to the ", others, " that are left")));
  }
}

void InaClient::log(std::string const& text) noexcept {
  if (!log_) return;
  try {
    log_(text);
  } catch (std::exception const&) {
    // Whoever logs may fail; the operation is not affected.
  }
}

// Steps 1 and 2.
void InaClient::begin(InaPlan const& plan, std::span<const std::byte> input,
                      std::span<std::byte> output, Deadline const& deadline) {
  ++operation_;
  TimePoint const now = deadline.now();
  std::uint64_t const blocks = plan.blocks();
  std::uint64_t const elements_of_block = plan.block_bytes / plan.entry().bytes;
  auto const count =
      static_cast<std::uint64_t>(std::popcount(left_)) * static_cast<std::uint64_t>(streams_each_);
  std::uint64_t i = 0;
  for (Stream& stream : streams_) {
    if ((left_ >> stream.aggregator & 1) == 0) continue;
    std::uint64_t const first = std::min(blocks * i / count * elements_of_block, plan.elements);
    ++i;
    std::uint64_t const past = std::min(blocks * i / count * elements_of_block, plan.elements);
    InaPlan part = plan;
    part.elements = past - first;
    std::size_t const begin = stream.begin = first * plan.entry().bytes;
    std::size_t const bytes = part.bytes();
    auto const message =
        stream.worker->start(part, rank_, operation_, input.subspan(begin, bytes),
                             output.subspan(begin, bytes), now, deadline.remaining());
    stream.running = true;
    ++running_;
    send(stream, message);
  }
}

std::span<const ByteRange> InaClient::reduce(InaPlan const& plan, std::span<const std::byte> input,
                                             std::span<std::byte> output,
                                             Deadline const& deadline) {
  require_plan(plan);
  require_data(plan, input, output);
  require<AggregatorLost>(left_ != 0, "no aggregator is left of ", link_->size(),
                          "; restart them and the job");
  running_ = 0;
  refusal_ = nullptr;
  losses_.clear();
  written_.clear();
  try {
    begin(plan, input, output, deadline);
    // Step 3.
    while (running_ > 0) {
      Deadline const patient = deadline.within(patience_);
      auto const event = link_->next(patient);
      switch (event.kind) {
        case AggregatorLink::Event::Kind::message:
          take(event, deadline.now());
          break;
        case AggregatorLink::Event::Kind::lost:
          lose(event.aggregator, link_->loss(event.aggregator));
          break;
        case AggregatorLink::Event::Kind::late:
          abandon(concat("no update within ", patient.allowance_seconds(), " s"));
          break;
      }
    }
    send_rest(deadline);
  } catch (...) {
    abandon("the operation was given up");
    throw;
  }
  if (refusal_) std::rethrow_exception(refusal_);
  require<AggregatorLost>(losses_.empty(), "in-network aggregation: ", losses_);
  collect_written();
  return written_;
}

void InaClient::collect_written() {
  for (Stream const& stream : streams_) {
    if ((left_ >> stream.aggregator & 1) == 0) continue;
    for (ByteRange const& part : stream.worker->written()) {
      written_.push_back({.begin = stream.begin + part.begin, .end = stream.begin + part.end});
    }
  }
}

void InaClient::take(AggregatorLink::Event const& event, TimePoint now) {
  received_bytes_ += event.bytes.size();
  bool const ours = event.instance < static_cast<std::uint32_t>(streams_each_);
  Stream* const stream = ours ? &stream_of(event.aggregator, event.instance) : nullptr;
  if (!ours || !stream->running) {
    return lose(event.aggregator,
                concat("it sends to instance ", event.instance, ", which waits for nothing"));
  }
  std::optional<InaMessage> answer;
  try {
    answer = stream->worker->receive(event.bytes, now);
  } catch (MalformedFrame const& error) {
    return lose(event.aggregator, error.what());
  } catch (AggregationTimeout const& error) {
    return lose(event.aggregator, error.what());
  } catch (PeerInvalid const& error) {
    // It accuses a worker of nonsense. Which of the two it comes from, or whether from the way
    // between them, is not known; the next operation would meet it again.
    return lose(event.aggregator, error.what());
  } catch (Error const&) {
    return end(*stream, std::current_exception());  // a refusal
  }
  if (answer) return send(*stream, *answer);
  end(*stream, nullptr);
}

void InaClient::send(Stream& stream, InaMessage const& message) {
  sent_bytes_ += message.size();
  link_->send(stream.aggregator, stream.instance, message);
}

void InaClient::end(Stream& stream, std::exception_ptr const& why) {
  stream.running = false;
  --running_;
  auto const number = static_cast<std::size_t>(&stream - streams_.data());
  if (!why || (refusal_ && refused_ < number)) return;
  refusal_ = why;
  refused_ = number;
}

// Ends all streams of an aggregator.
void InaClient::lose(int aggregator, std::string const& why) {
  if ((left_ >> aggregator & 1) == 0) return;
  forget(aggregator, why);
  losses_ +=
      concat(losses_.empty() ? "" : "; ", "aggregator ", link_->address(aggregator), ": ", why);
  for (Stream& stream : streams_) {
    if (stream.running && stream.aggregator == aggregator) end(stream, nullptr);
  }
}

// Step 4.
void InaClient::send_rest(Deadline const& deadline) {
  for (int i = 0; i < link_->size(); ++i) {
    if (!link_->flush(i, deadline)) lose(i, "it does not read");
  }
}

// What these aggregators still wait for never comes: their connections end, which tells them.
void InaClient::abandon(std::string const& why) {
  for (Stream const& stream : streams_) {
    if (stream.running) lose(stream.aggregator, why);
  }
  for (int i = 0; i < link_->size(); ++i) {
    if (!link_->flushed(i)) lose(i, why);
  }
}

}  // namespace sparsecomm
