#include "ina_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  sparsecomm::fuzz::run_ina(std::as_bytes(std::span(data, size)));
  return 0;
}
