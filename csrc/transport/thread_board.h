// A board for ranks that are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "transport/board.h"

namespace sparsecomm {

// One board per rank, [rank]; they share what is on it.
std::vector<std::shared_ptr<Board>> make_thread_boards(int size);

}  // namespace sparsecomm
