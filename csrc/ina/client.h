// A worker's side of one reduction through several aggregators.
//
// 1. Cut the blocks into streams, runs of about the same length: as many for each aggregator that
//    is left, however few the blocks, so that workers which disagree meet in all of them. A stream
//    is an operation of its own in an instance of its own: while a message of one is on its way, so
//    are those of the others.
// 2. Send the first message of each stream.
// 3. Hand each message that comes to its stream, and send what that answers, until every stream has
//    ended: complete, refused for all workers alike, or without its aggregator. A stream that fails
//    ends no other, so that aggregators which are left stay in step with all workers.
// 4. Send the rest of messages that were answered before all of them had gone, as refusals may be:
//    it lies in memory that the next reduction uses.
//
// One thread drives all streams; docs/architecture.md says why ("Aggregators"). Source: Gu et al.
// 2024 (OmNICCL), section 2.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "ina/link.h"
#include "ina/plan.h"
#include "ina/policy.h"

namespace sparsecomm {

// Aggregators were lost or late in an operation, or had been before it.
class AggregatorLost : public Error {
 public:
  using Error::Error;
};

// An aggregator that is done without.
struct AggregatorLoss {
  std::string address, why;
};
inline std::map<std::string, std::string> reasons(std::vector<AggregatorLoss> const& losses) {
  std::map<std::string, std::string> why;
  for (auto const& loss : losses) why.emplace(loss.address, loss.why);
  return why;
}

class InaClient {
 public:
  static constexpr int default_streams = 4;
  static constexpr Duration default_patience = std::chrono::seconds(30);
  // `streams`: of an aggregator, at most AggregatorLink::most_instances. Aggregators that are
  // waited for count as lost if none of them sends anything for as long as `patience`. `log`: told
  // by keep() of each that has been lost, once; may be null.
  InaClient(std::shared_ptr<AggregatorLink> link, int rank, int streams = default_streams,
            Duration patience = default_patience, std::function<void(std::string const&)> log = {},
            InaPolicy const& policy = vote_policy);
  InaClient(InaClient const&) = delete;
  InaClient& operator=(InaClient const&) = delete;

  // Reduces `input` over all workers into `output`, which is the same memory or none of it and is
  // undefined after a throw. Writes only the blocks that are not zero on some worker, and returns
  // the parts that it has written, in no particular order, valid until the next call; the others
  // keep what they held, zeros if the memory is the same. All workers make the same calls in the
  // same order; plan.elements is of the whole. Throws what a refusal says, AggregatorLost with the
  // addresses, Interrupted, and what the deadline's interrupt throws. O(plan.blocks()) time.
  // Allocates only for errors, and where messages are longer or parts more numerous than before. A
  // refusal is the same, in the same words, on all workers that are connected.
  std::span<const ByteRange> reduce(InaPlan const& plan, std::span<const std::byte> input,
                                    std::span<std::byte> output, Deadline const& deadline);

  // A bit for each aggregator that is left: at most 64.
  std::uint64_t left() const { return left_; }
  // Does without the others from now on. Workers must use the same ones.
  void keep(std::uint64_t aggregators, std::string const& why);
  // Uses these too from now on, lost ones to which the link has connected again. The connections to
  // others that are lost end. Workers must use the same ones.
  void use_again(std::uint64_t aggregators);
  // Ends all connections, which tells the other workers; allocates nothing.
  void leave() noexcept;
  // Those that are not left, each once, in the order in which they were lost. On any thread.
  std::vector<AggregatorLoss> lost() const {
    std::lock_guard const lock(lost_mutex_);
    return lost_;
  }
  AggregatorLink const& link() const { return *link_; }

  // Bytes of all messages, without their envelopes.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  std::uint64_t received_bytes() const { return received_bytes_; }

 private:
  struct Stream {
    std::unique_ptr<WorkerMachine> worker;
    int aggregator = 0;
    std::uint32_t instance = 0;
    std::size_t begin = 0;  // of its part of the output, in bytes
    bool running = false;
  };

  Stream& stream_of(int aggregator, std::uint32_t instance);
  void begin(InaPlan const& plan, std::span<const std::byte> input, std::span<std::byte> output,
             Deadline const& deadline);
  void take(AggregatorLink::Event const& event, TimePoint now);
  void send(Stream& stream, InaMessage const& message);
  void end(Stream& stream, std::exception_ptr const& why);
  void lose(int aggregator, std::string const& why);
  void forget(int aggregator, std::string const& why);
  void log_losses() noexcept;
  void log(std::string const& text) noexcept;
  void send_rest(Deadline const& deadline);
  void collect_written();
  void abandon(std::string const& why);

  std::shared_ptr<AggregatorLink> const link_;
  int const rank_;
  int const streams_each_;
  Duration const patience_;
  std::function<void(std::string const&)> const log_;
  std::uint64_t left_;
  mutable std::mutex lost_mutex_;
  std::vector<AggregatorLoss> lost_;  // changes on the thread that reduces
  std::size_t logged_ = 0;            // of those
  std::uint32_t operation_ = 0;
  std::vector<Stream> streams_;  // [aggregator][instance]
  std::size_t running_ = 0;      // of the streams
  std::exception_ptr refusal_;   // of the first stream that has one, whatever came first
  std::size_t refused_ = 0;      // that stream
  std::string losses_;
  std::vector<ByteRange> written_;
  std::uint64_t sent_bytes_ = 0, received_bytes_ = 0;
};

}  // namespace sparsecomm
