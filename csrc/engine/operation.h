// What a communicator runs: one exchange between all ranks.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "collectives/channel.h"
#include "engine/fusion.h"
#include "engine/observer.h"
#include "engine/proposal.h"

namespace sparsecomm {

// See Communicator::commit().
class Commit {
 public:
  virtual void commit(Channel& channel) = 0;

 protected:
  ~Commit() = default;
};

// What all ranks' proposals come to.
struct Agreement {
  bool all_finite = true;
  std::span<const std::byte> payload = {};  // of all ranks, merged; valid as long as run()
  Duration waited{};                        // for the other ranks, and compared with them
  bool ends_batch = false;                  // its batch ends with this operation, which commits
  Commit* committer = nullptr;              // null: commit() does nothing
  // What run() exchanges together, this operation first, see Fusion; empty: itself, unless another
  // one has done so.
  std::span<Fusible* const> fused = {};

  // Called when the result is there, before the caller's data is changed in a way that cannot be
  // undone. Returns if the result is to be used.
  void commit(Channel& channel) const {
    if (committer != nullptr) committer->commit(channel);
  }
};

// Operations whose results are used together: they stand on all survivors of a failure or on none.
// The one that runs last commits for all.
class Batch {
 public:
  // How many of them have not ended; null: more may be added. From any thread.
  virtual std::optional<std::size_t> left() const = 0;
  // Whether all of it has been submitted, and nothing else will be to the same communicator before
  // it has ended.
  virtual bool is_closed() const { return false; }

 protected:
  ~Batch() = default;
};

class FixedBatch final : public Batch {
 public:
  explicit constexpr FixedBatch(std::optional<std::size_t> left) : left_(left) {}
  std::optional<std::size_t> left() const override { return left_; }

 private:
  std::optional<std::size_t> left_;
};
inline constexpr FixedBatch batch_of_one(1), open_batch(std::nullopt);

class Join;  // engine/join.h

class Operation {
 public:
  virtual ~Operation() = default;
  // Whether prepare() need not wait for anything. While it must, other operations may go first.
  virtual bool is_ready() const { return true; }
  // Local preparation on the progress thread, before anything is exchanged. An exception here
  // becomes an error on every rank, and the communicator stays usable.
  virtual Proposal prepare() = 0;
  // Merges one rank's payload, as it arrived, into those of the ranks before it. Called for every
  // rank with the same key, in order, this one included; `into` begins as zeros, and both have the
  // size of this rank's own. Throws MalformedFrame where a rank cannot have sent such a payload.
  // Returns false if it belongs to another operation than the others: then ranks disagree, and
  // `into` serves changing_fields().
  virtual bool merge(std::span<std::byte> /*into*/, std::span<const std::byte> other) const {
    require<Error>(other.empty(), "an operation has a payload, but no merge()");
    return true;
  }
  // Lists what ranks must agree on beside the text, in its form. Called only to explain a mismatch,
  // after merge(), with what that has made of the payloads.
  virtual std::string changing_fields(std::span<const std::byte> /*payload*/) const { return {}; }
  // Says all that it takes to make a stand-in, see Join: the same for the same key. Called after
  // prepare(), with what that has returned.
  virtual std::string description(Proposal const& proposal) const {
    return std::string(proposal.text);
  }
  // Null unless it is one.
  virtual Join* as_join() { return nullptr; }
  // What may be exchanged with other operations; null: this is exchanged alone. Called after the
  // agreement, whose payload this is, and before run(), if there are others. Null on all ranks or
  // on none, and then with the same terms.
  virtual Fusible* fusible(std::span<const std::byte> /*payload*/) { return nullptr; }
  virtual void run(Channel& channel, Agreement const& agreement) = 0;
  // The batch that the operation belongs to; null: none. If Agreement::ends_batch is set, since
  // nothing else is left of the batch on any rank, run() calls Agreement::commit() exactly once; a
  // rank that is alone need not.
  virtual Batch const* batch() const { return nullptr; }
  // Whether nothing else will be submitted to the communicator before what is pending has ended.
  virtual bool is_last() const { return batch() != nullptr && batch()->is_closed(); }
  // Leaves the caller's data so that nothing is lost, after a failure: in prepare(), in run(), or
  // before either of them was called.
  virtual void roll_back() noexcept {}
  // Of stages that the communicator knows: Stage::whole and Stage::agree; others are the
  // operation's own. Null: nobody looks.
  virtual StageObserver* observer() { return nullptr; }
};

// Proposes nothing and moves nothing.
class Nothing final : public Operation {
 public:
  Proposal prepare() override { return {.text = ""}; }
  void run(Channel& /*channel*/, Agreement const& /*agreement*/) override {}
};

}  // namespace sparsecomm
