// A torch store whose calls end even if its server does not answer.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/clock.h"

namespace sparsecomm {

// Uses a connection of its own to the server of `store`, which the first call makes; one thread at
// a time may use it. A call ends within `timeout` at most, and a server that does not answer for
// half a minute is given up: that call, and every later one, throws Error. While a call waits,
// `check` is called, which throws to give the server up.
//
// The thread of a call that was given up is left alone until the server answers or goes; what was
// asked may then be done. clone(), to be called when connecting is over, returns a store that is
// not bounded; the first one has the same connection.
c10::intrusive_ptr<c10d::Store> make_bounded_store(c10::intrusive_ptr<c10d::Store> store,
                                                   Duration timeout, std::function<void()> check);

}  // namespace sparsecomm
