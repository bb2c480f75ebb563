// A board in a torch store.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/board.h"

namespace sparsecomm {

// `store` is for these ranks and this purpose alone. What may never return, since the store's host
// may have stopped, is done by threads of the board's own, over connections of their own; they
// outlive the board if they are stuck.
std::shared_ptr<Board> make_store_board(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

}  // namespace sparsecomm
