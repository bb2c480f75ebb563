// A module with a C++ runtime of its own inside.
#include "base/error.h"

extern "C" __attribute__((visibility("default"))) int sparsecomm_text_size() {
  return static_cast<int>(sparsecomm::concat("vector ", 12345ul, ' ', 1.5).size());
}
