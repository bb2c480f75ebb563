// Which of the operations that were submitted runs next, alike on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>

#include "base/clock.h"
#include "base/runtime.h"
#include "collectives/algorithm.h"
#include "collectives/channel.h"
#include "engine/comparison.h"
#include "engine/observer.h"
#include "engine/operation.h"
#include "engine/ticket.h"
#include "engine/timeline.h"

namespace sparsecomm {

// An operation whose turn it is.
struct Scheduled {
  Pending pending = {};
  Agreement agreement = {};
  std::exception_ptr error = {};  // it is not to run: the same on all ranks
  ObservedStage whole = {};       // of the operation, since it is prepared, or since its turn
};

enum class Turn : std::uint8_t {
  taken,    // an operation is handed over
  nothing,  // no operation is to run now
  others,   // the next one is not the caller's: it is for another thread
};

// Some ranks have added an operation, the others have not before its deadline: the same error on
// all.
class NotSubmitted : public Timeout {
 public:
  using Timeout::Timeout;
};

class Coordinator {
 public:
  virtual ~Coordinator() = default;

  // From any thread. Throws InvalidArgument if an operation of that name is pending. Returns true
  // if the thread that uses the transport may idle there: Transport::wake() lets it hear of this.
  virtual bool add(Pending pending) = 0;
  virtual bool empty() const = 0;
  // Whether other ranks may need this one's part in the next round though it is empty.
  virtual bool listens() const = 0;

  // The following are for one thread at a time, the one that has the turn.

  // To be called if it is not empty, or listens. Decides with all other ranks what runs next, and
  // hands it over, with the observer's Stage::whole begun. `callers`: only what has no ticket.
  // `first`: runs before, on all ranks if on any; null: this rank has none. What it throws ends the
  // communicator; then nothing has been handed over.
  virtual Turn round(Channel& channel, Scheduled& next, bool callers, Operation* first) = 0;
  // Gives what has no ticket one, since another thread is to run it.
  virtual void add_ticket(std::shared_ptr<Ticket> ticket) = 0;
  // Hands over what is not to run any more. Not where it is empty.
  virtual Pending take() = 0;
};

// See CommunicatorOptions.
struct CoordinatorOptions {
  std::size_t capacity;  // of the cache of names
  Duration timeout;      // of an operation that some ranks do not add
  std::size_t fusion_bytes;
  Timeline& timeline;
  Runtime runtime = {};  // of the tickets of stand-ins
};

// Runs operations that have a name once all ranks have added one of that name, in an order that is
// the same on all ranks; those without one in the order in which they were added. Compares an
// operation only where ranks have something new to say of it. See coordinator.cc.
std::unique_ptr<Coordinator> make_coordinator(Comparison& comparison,
                                              CoordinatorOptions const& options);

// A round in which all ranks bring one operation as before, and know so many.
// `payload_bytes`: of each rank, unless they are known; 0: none.
Cost agreement_cost(int ranks, std::size_t payload_bytes, std::size_t names = 1);

}  // namespace sparsecomm
