// Workers and an aggregator of in-network aggregation, whose messages a test delivers in any order.
//
// A message is read where its machine left it at the moment it is delivered, and not before: a
// machine that writes over what is in flight breaks its checksum.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ina/aggregator.h"
#include "ina/worker.h"

namespace sparsecomm::test {

using Bytes = std::vector<std::byte>;

// Own for each message, so that a sanitizer sees a read beyond it.
inline Bytes assemble(InaMessage const& message) {
  EXPECT_LE(message.pieces().size(), 3u);
  Bytes bytes;
  bytes.reserve(message.size());
  for (auto const piece : message.pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

template <class T>
T load_element(std::span<const std::byte> bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// Element by element, by the words of the contract; the ranks one after another, each with all its
// elements.
template <class T>
Bytes dense_reduction(Reduction reduction, std::vector<Bytes> const& inputs) {
  using Sum = accumulate_t<T>;
  Bytes result = inputs[0];
  std::size_t const elements = inputs[0].size() / sizeof(T);
  for (std::size_t i = 0; i < elements; ++i) {
    auto sum = static_cast<Sum>(load_element<T>(inputs[0], i));
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      auto const value = static_cast<Sum>(load_element<T>(inputs[rank], i));
      bool const nan = sum != sum || value != value;
      switch (reduction) {
        case Reduction::sum:
          if constexpr (std::is_integral_v<Sum>) {
            sum = static_cast<Sum>(std::uint64_t(sum) + std::uint64_t(value));
          } else {
            sum = sum + value;
          }
          break;
        case Reduction::product:
          if constexpr (std::is_integral_v<Sum>) {
            sum = static_cast<Sum>(std::uint64_t(sum) * std::uint64_t(value));
          } else {
            sum = sum * value;
          }
          break;
        case Reduction::min:
          if (nan ? sum == sum : !(sum < value)) sum = value;
          break;
        case Reduction::max:
          if (nan ? sum == sum : !(sum > value)) sum = value;
          break;
      }
    }
    T const rounded = static_cast<T>(sum);
    std::memcpy(result.data() + i * sizeof(T), &rounded, sizeof(T));
  }
  return result;
}

// Calls f.template operator()<T>() with the C++ type.
template <class F>
decltype(auto) visit_element_type(ElementType type, F&& f) {
  switch (type) {
    case ElementType::f32:
      return f.template operator()<float>();
    case ElementType::f64:
      return f.template operator()<double>();
    case ElementType::f16:
      return f.template operator()<Half>();
    case ElementType::bf16:
      return f.template operator()<BFloat16>();
    case ElementType::i32:
      return f.template operator()<std::int32_t>();
    case ElementType::i64:
      return f.template operator()<std::int64_t>();
    case ElementType::i8:
      return f.template operator()<std::int8_t>();
    case ElementType::i16:
      return f.template operator()<std::int16_t>();
    case ElementType::u8:
      return f.template operator()<std::uint8_t>();
  }
  throw InvalidArgument("no element type");
}

inline Bytes dense_reduction(InaPlan const& plan, std::vector<Bytes> const& inputs) {
  return visit_element_type(plan.type,
                            [&]<class T>() { return dense_reduction<T>(plan.reduction, inputs); });
}

// Compares bits, except that a NaN equals any other: IEEE 754 leaves open which NaN a sum gives.
template <class T>
bool same_elements(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
    auto const x = load_element<T>(a, i);
    auto const y = load_element<T>(b, i);
    if (std::memcmp(&x, &y, sizeof(T)) == 0) continue;
    auto const p = static_cast<accumulate_t<T>>(x);
    auto const q = static_cast<accumulate_t<T>>(y);
    if (p == p || q == q) return false;
  }
  return true;
}
inline bool same_elements(ElementType type, std::span<const std::byte> a,
                          std::span<const std::byte> b) {
  return visit_element_type(type, [&]<class T>() { return same_elements<T>(a, b); });
}

// The numbers of the blocks that are not zero.
inline std::vector<std::uint32_t> nonzero_blocks(Bytes const& input, std::size_t block_bytes) {
  std::vector<std::uint32_t> numbers;
  for (std::size_t begin = 0; begin < input.size(); begin += block_bytes) {
    auto const block = std::span(input).subspan(begin, std::min(block_bytes, input.size() - begin));
    if (std::ranges::count(block, std::byte{0}) != std::ssize(block)) {
      numbers.push_back(static_cast<std::uint32_t>(begin / block_bytes));
    }
  }
  return numbers;
}

// Returns the output with zeros where nothing was written; expects `before` there.
inline Bytes completed(Bytes const& output, std::span<const ByteRange> written, std::byte before) {
  Bytes complete(output.size()), rest = output;
  for (auto const& [begin, end] : written) {
    std::ranges::copy(std::span(output).subspan(begin, end - begin), complete.data() + begin);
    std::ranges::fill(std::span(rest).subspan(begin, end - begin), before);
  }
  EXPECT_EQ(rest, Bytes(rest.size(), before));
  return complete;
}

struct InaRunOptions {
  bool in_place = false;
  bool in_spot = false;  // messages are received to the aggregator's spots
  std::uint32_t operation = 1;
};

// One operation. Its next event is a choice: i < workers delivers the message of worker i to the
// aggregator, i >= workers an update to worker i - workers.
class InaRun {
 public:
  InaRun(InaAggregator& aggregator, std::vector<InaWorker>& workers, InaPlan const& plan,
         std::vector<Bytes> const& inputs, InaRunOptions options = {})
      : aggregator_(aggregator),
        workers_(workers),
        plan_(plan),
        options_(options),
        inputs_(inputs),
        ups_(plan.workers),
        downs_(plan.workers) {
    // Bytes that are not written show.
    outputs_ = options.in_place ? inputs : std::vector(inputs.size(), Bytes(plan.bytes(), junk));
    if (workers.size() < plan.workers) workers.resize(plan.workers);
    aggregator.start(plan, options.operation, now_, limit);
    for (int rank = 0; rank < plan.workers; ++rank) {
      auto& output = outputs_[rank];
      ups_[rank] =
          workers[rank].start(plan, rank, options.operation,
                              options.in_place ? output : inputs_[rank], output, now_, limit);
    }
  }
  virtual ~InaRun() = default;

  std::vector<int> choices() const {
    std::vector<int> open;
    for (int i = 0; i < 2 * plan_.workers; ++i) {
      if (i < plan_.workers ? ups_[i].has_value() : downs_[i - plan_.workers].has_value()) {
        open.push_back(i);
      }
    }
    return open;
  }

  void step(int choice) {
    if (choice < plan_.workers) return contribute(choice);
    int const worker = choice - plan_.workers;
    Bytes const bytes = assemble(*downs_[worker]);
    downs_[worker].reset();
    ups_[worker] = workers_[worker].receive(bytes, now_);
    updated(worker);
  }

  template <class Random>
  void finish(Random& random) {
    for (auto open = choices(); !open.empty(); open = choices()) step(open[random() % open.size()]);
  }

  bool complete() const {
    return aggregator_.done() &&
           std::ranges::all_of(std::span(workers_).first(plan_.workers), &InaWorker::done);
  }
  // With zeros for the blocks that are not written, which must be as they were: those that are zero
  // on all workers, and no others.
  std::vector<Bytes> outputs() const {
    std::vector<Bytes> outputs(plan_.workers);
    std::vector<ByteRange> const expected = ranges_of_union();
    for (int rank = 0; rank < plan_.workers; ++rank) {
      auto const written = workers_[rank].written();
      EXPECT_TRUE(std::ranges::equal(written, expected))
          << written.size() << " and " << expected.size();
      outputs[rank] = completed(outputs_[rank], written, options_.in_place ? std::byte{0} : junk);
    }
    return outputs;
  }
  std::vector<Bytes> const& inputs() const { return inputs_; }

  static constexpr std::byte junk{0x5a};
  static constexpr Duration limit = std::chrono::seconds(10);

 protected:
  virtual void contributed(int /*worker*/, bool /*round_ends*/) {}
  virtual void updated(int /*worker*/) {}

  InaAggregator& aggregator_;
  std::vector<InaWorker>& workers_;
  InaPlan const plan_;
  InaRunOptions const options_;

 private:
  // As few as there can be.
  std::vector<ByteRange> ranges_of_union() const {
    std::set<std::uint32_t> every;
    for (Bytes const& input : inputs_) {
      auto const numbers = nonzero_blocks(input, plan_.block_bytes);
      every.insert(numbers.begin(), numbers.end());
    }
    std::vector<ByteRange> ranges;
    for (std::uint32_t const number : every) {
      std::size_t const begin = std::size_t{number} * plan_.block_bytes;
      std::size_t const end = std::min<std::size_t>(begin + plan_.block_bytes, plan_.bytes());
      if (ranges.empty() || ranges.back().end != begin) ranges.push_back({begin, begin});
      ranges.back().end = end;
    }
    return ranges;
  }

  void contribute(int worker) {
    Bytes bytes = assemble(*ups_[worker]);
    ups_[worker].reset();
    std::span<const std::byte> in = bytes;
    if (options_.in_spot) {
      auto const spot = aggregator_.receive_spot(worker);
      std::ranges::copy(bytes, spot.begin());
      in = spot.first(bytes.size());
    }
    auto const update = aggregator_.receive(worker, in, now_);
    std::ranges::fill(bytes, junk);  // no longer needed
    if (update) {
      for (auto& down : downs_) {
        EXPECT_FALSE(down.has_value());
        down = update;
      }
    }
    contributed(worker, update.has_value());
  }

  TimePoint const now_{std::chrono::hours(1)};
  std::vector<Bytes> const inputs_;
  std::vector<Bytes> outputs_;
  std::vector<std::optional<InaMessage>> ups_, downs_;
};

}  // namespace sparsecomm::test
