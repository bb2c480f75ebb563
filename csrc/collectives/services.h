// Services: what a communicator has beside its ranks. They are handed to an algorithm when it is
// made, and are there whenever it runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

#include "transport/transport.h"

namespace sparsecomm {

class InaClient;  // ina/client.h

// The service that an algorithm cannot do without.
enum class Needs : std::uint8_t { nothing, native_allreduce, aggregators };

constexpr std::string_view name(Needs needs) {
  switch (needs) {
    case Needs::nothing:
      return "nothing";
    case Needs::native_allreduce:
      return "native_allreduce";
    case Needs::aggregators:
      return "aggregators";
  }
  return {};
}

struct Services {
  NativeAllreduce* native = nullptr;  // null: the transport has none
  InaClient* aggregators = nullptr;   // null: none were given

  // As many on every rank.
  int aggregators_left() const;

  // Why an algorithm with these needs cannot run over that transport, and what to do; empty if it
  // can.
  std::string missing(Needs needs, std::string_view transport) const {
    switch (needs) {
      case Needs::nothing:
        return {};
      case Needs::native_allreduce:
        if (native != nullptr) return {};
        return concat(
            "it is the allreduce of the transport's engine, and ", transport,
            R"( has none; use transport "c10d", or the algorithm "dense", which needs none)");
      case Needs::aggregators:
        if (aggregators != nullptr) return {};
        return R"(it needs aggregators and has none; give it the addresses of some, or use the )"
               R"(algorithm "dense", which needs none)";
    }
    return concat("it needs a service of number ", static_cast<int>(needs), ", which is unknown");
  }
};

struct AlgorithmOptions;

// A new A, which gets the services if its constructor takes them.
template <class A>
std::unique_ptr<A> make_algorithm(AlgorithmOptions const& options, Services const& services) {
  if constexpr (std::is_constructible_v<A, AlgorithmOptions const&, Services const&>) {
    return std::make_unique<A>(options, services);
  } else {
    return std::make_unique<A>(options);
  }
}

}  // namespace sparsecomm
