#include "collectives/services.h"

#include <bit>

#include "ina/client.h"

namespace sparsecomm {

int Services::aggregators_left() const {
  return aggregators == nullptr ? 0 : std::popcount(aggregators->left());
}

}  // namespace sparsecomm
