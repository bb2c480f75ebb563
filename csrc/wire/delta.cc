#include "wire/delta.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "wire/codecs.h"
#include "wire/index_kernels.h"

namespace sparsecomm::delta {
namespace {

constexpr std::uint32_t max_parameter = 31;
constexpr std::uint8_t exceptions_flag = 0x80;

constexpr std::size_t bytes_of(std::size_t bits) { return (bits + 7) / 8; }

constexpr std::size_t blocks_of(std::size_t count) { return (count + block_size - 1) / block_size; }

using Words = std::array<std::uint32_t, block_size>;

struct Gaps {
  Words gap;  // zero-padded to a whole block: zeros add nothing to the sums
  std::size_t size;
  std::uint32_t mean;
  std::uint32_t all_bits;  // of all gaps, or-ed

  Gaps(IndexKernels const& kernels, std::span<const std::uint32_t> indices, std::uint32_t next)
      : size(indices.size()) {
    if (size == block_size) {
      all_bits = kernels.gaps(indices.data(), next, gap.data());
    } else {
      gap.fill(0);
      gap[0] = indices[0] - next;
      for (std::size_t i = 1; i < size; ++i) gap[i] = indices[i] - indices[i - 1] - 1;
      all_bits = 0;
      for (std::uint32_t const g : gap) all_bits |= g;
    }
    mean = static_cast<std::uint32_t>((indices[size - 1] - next - (size - 1)) / size);
  }

  std::uint32_t exceptions(std::uint32_t parameter) const {
    if (all_bits >> parameter <= max_unary) return 0;
    std::uint32_t sum = 0;
    for (std::uint32_t const g : gap) sum += g >> parameter > max_unary;
    return sum;
  }
};

struct Plan {
  std::uint32_t parameter;
  std::size_t exceptions;
  std::size_t low_bytes;
  std::size_t high_bytes;

  std::size_t exception_bytes() const { return exceptions == 0 ? 0 : 1 + 5 * exceptions; }
  std::size_t bytes() const { return 1 + exception_bytes() + low_bytes + high_bytes; }
};

// The parameter of the fewest bits, exactly. Upwards of 2^b > mean gap the high parts take fewer
// than n bits in all, so a larger b cannot save the n it adds; downwards the unary cost only grows,
// which ends the search.
Plan plan_block(IndexKernels const& kernels, Gaps const& gaps) {
  auto const n = static_cast<std::uint32_t>(gaps.size);
  std::uint32_t parameter =
      std::min<std::uint32_t>(max_parameter, std::uint32_t(std::bit_width(gaps.mean)));
  // One more may save the byte that counts exceptions.
  if (gaps.exceptions(parameter) > 0) parameter = std::min(max_parameter, parameter + 1);

  std::uint32_t best = 0;
  std::uint32_t best_unary = 0;
  std::uint32_t best_exceptions = 0;
  std::uint32_t least_bits = ~0u;
  for (;; --parameter) {
    // The bits that the high parts take beyond one each, if an exception took max_unary.
    std::uint32_t const unary = kernels.high_bits(gaps.gap.data(), parameter);
    std::uint32_t const exceptions = gaps.exceptions(parameter);
    std::uint32_t const bits = n * (parameter + 1) + unary + (exceptions > 0 ? 8 : 0);
    if (bits < least_bits) {
      least_bits = bits;
      best = parameter;
      best_unary = unary;
      best_exceptions = exceptions;
    }
    if (parameter == 0 || n + unary >= least_bits) break;
  }
  return {best, best_exceptions, bytes_of(std::size_t{n} * best),
          bytes_of(n + best_unary - max_unary * best_exceptions)};
}

std::byte* put(std::byte* out, void const* from, std::size_t bytes) {
  std::memcpy(out, from, bytes);
  return out + bytes;
}

std::byte* put_exceptions(std::byte* out, Gaps const& gaps, Plan const& plan) {
  *out++ = std::byte(plan.exceptions);
  std::byte* highs = out + plan.exceptions;
  for (std::size_t i = 0; i < gaps.size; ++i) {
    std::uint32_t const high = gaps.gap[i] >> plan.parameter;
    if (high <= max_unary) continue;
    *out++ = std::byte(i);
    highs = put(highs, &high, sizeof(high));
  }
  return highs;
}

// Bits one behind another, lowest first.
class BitWriter {
 public:
  explicit BitWriter(std::uint64_t* words) : words_(words) {}

  // The lowest `length` bits of `bits`, 0 to 64; the others are zeros.
  void append(std::uint64_t bits, std::uint32_t length) {
    pending_ |= bits << fill_;
    *words_ = pending_;
    std::uint32_t const next = fill_ + length;
    std::uint32_t const full = next >> 6;
    // What did not fit; a shift by 64 is done in two.
    pending_ = full == 0 ? pending_ : (bits >> 1) >> (63 - fill_);
    words_ += full;
    fill_ = next & 63;
  }
  // Writes what is left; a word more than is full.
  void finish() { *words_ = pending_; }

 private:
  std::uint64_t* words_;
  std::uint64_t pending_ = 0;
  std::uint32_t fill_ = 0;
};

// Two gaps at a time, whose low parts take at most 62 bits, or four.
std::byte* put_low_parts(std::byte* out, Gaps const& gaps, Plan const& plan) {
  constexpr std::size_t half = block_size / 2;
  std::uint32_t const parameter = plan.parameter;
  std::array<std::uint64_t, half> pairs;
  std::uint64_t const mask = (std::uint64_t{1} << parameter) - 1;
  for (std::size_t i = 0; i < half; ++i) {
    pairs[i] = (gaps.gap[2 * i] & mask) | (gaps.gap[2 * i + 1] & mask) << parameter;
  }
  std::array<std::uint64_t, half + 1> words;
  BitWriter writer(words.data());
  if (parameter <= 16) {
    for (std::size_t i = 0; i < half; i += 2) {
      writer.append(pairs[i] | pairs[i + 1] << 2 * parameter, 4 * parameter);
    }
  } else {
    for (std::uint64_t const pair : pairs) writer.append(pair, 2 * parameter);
  }
  writer.finish();
  return put(out, words.data(), plan.low_bytes);
}

// The ones of gaps, one behind another: four at a time where theirs fit into a word.
std::byte* put_high_parts(std::byte* out, Gaps const& gaps, Plan const& plan) {
  std::array<std::uint64_t, block_size*(max_unary + 1) / 64 + 2> words;
  BitWriter writer(words.data());
  std::uint32_t const parameter = plan.parameter;
  if (gaps.size == block_size && gaps.all_bits >> parameter < 16) {
    for (std::size_t i = 0; i < block_size; i += 4) {
      std::uint32_t const first = gaps.gap[i] >> parameter;
      std::uint32_t const second = first + 1 + (gaps.gap[i + 1] >> parameter);
      std::uint32_t const third = second + 1 + (gaps.gap[i + 2] >> parameter);
      std::uint32_t const fourth = third + 1 + (gaps.gap[i + 3] >> parameter);
      constexpr std::uint64_t one = 1;
      writer.append(one << first | one << second | one << third | one << fourth, fourth + 1);
    }
  } else {
    for (std::size_t i = 0; i < gaps.size; ++i) {
      std::uint32_t const high = gaps.gap[i] >> parameter;
      std::uint32_t const zeros = high > max_unary ? 0 : high;
      writer.append(std::uint64_t{1} << zeros, zeros + 1);
    }
  }
  writer.finish();
  return put(out, words.data(), plan.high_bytes);
}

template <class... Parts>
void valid(bool holds, Parts const&... parts) {
  require<MalformedFrame>(holds, "delta indices: ", parts...);
}

// What is left of the input.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  std::span<const std::byte> take(std::size_t bytes, std::string_view what) {
    valid(bytes <= in_.size(), what, " is ", bytes, " bytes, must be at most the ", in_.size(),
          " left");
    auto const part = in_.first(bytes);
    in_ = in_.subspan(bytes);
    return part;
  }
  std::uint8_t take_byte(std::string_view what) { return std::uint8_t(take(1, what)[0]); }
  std::span<const std::byte> left() const { return in_; }

 private:
  std::span<const std::byte> in_;
};

// Low parts, readable 16 bytes at a time: copied where the input ends too soon behind them.
class LowParts {
 public:
  LowParts(Reader& reader, std::size_t count, std::uint32_t parameter) {
    auto const packed = reader.take(bytes_of(count * parameter), "low parts");
    std::size_t const spare = count * parameter % 8;
    valid(spare == 0 || std::uint8_t(packed.back()) >> spare == 0, "padding of low parts is not 0");
    if (reader.left().size() >= most_read) [[likely]] {
      bytes_ = packed.data();
    } else {
      copy_.fill(std::byte{0});
      std::copy(packed.begin(), packed.end(), copy_.begin());
      bytes_ = copy_.data();
    }
  }
  LowParts(LowParts const&) = delete;
  LowParts& operator=(LowParts const&) = delete;

  std::byte const* data() const { return bytes_; }

 private:
  static constexpr std::size_t most_read = 16;
  std::byte const* bytes_;
  std::array<std::byte, bytes_of(block_size* max_parameter) + most_read> copy_;
};

struct Exceptions {
  std::span<const std::byte> positions;
  std::span<const std::byte> highs;
};

Exceptions take_exceptions(Reader& reader, std::size_t block) {
  std::size_t const count = reader.take_byte("number of exceptions");
  valid(count >= 1 && count <= block, "number of exceptions is ", count, ", must be 1 to ", block);
  auto const positions = reader.take(count, "positions of exceptions");
  return {positions, reader.take(4 * count, "high parts of exceptions")};
}

// Adds the exceptions' high parts to the indices behind them; returns what the last index grew by.
std::uint64_t apply(Exceptions const& exceptions, std::uint32_t parameter, std::uint32_t extent,
                    std::span<std::uint32_t> indices) {
  std::uint64_t offset = 0;
  std::size_t i = 0;
  for (std::size_t e = 0; e < exceptions.positions.size(); ++e) {
    auto const position = std::size_t(exceptions.positions[e]);
    valid(position >= i + (e > 0) && position < indices.size(), "position of exception ", e, " is ",
          position, ", must be ", i + (e > 0), " to ", indices.size() - 1);
    std::uint32_t high;
    std::memcpy(&high, exceptions.highs.data() + e * sizeof(high), sizeof(high));
    std::uint64_t const gap = std::uint64_t{high} << parameter;
    valid(high > max_unary && gap < extent, "gap of exception ", e, " is ", gap, ", must be above ",
          std::uint64_t{max_unary} << parameter, " and below extent ", extent);
    for (; i < position; ++i) indices[i] += static_cast<std::uint32_t>(offset);
    offset += gap;
  }
  for (; i < indices.size(); ++i) indices[i] += static_cast<std::uint32_t>(offset);
  return offset;
}

// Decodes one block whose first index is at least `next`; returns one more than its last index.
std::uint64_t decode_block(IndexKernels const& kernels, Reader& reader, std::uint64_t next,
                           std::uint64_t end, std::uint32_t extent,
                           std::span<std::uint32_t> indices) {
  std::uint8_t const tag = reader.take_byte("block parameter");
  std::uint32_t const parameter = tag & ~exceptions_flag;
  valid(parameter <= max_parameter, "block parameter is ", parameter, ", must be at most ",
        max_parameter);
  Exceptions exceptions;
  if ((tag & exceptions_flag) != 0) exceptions = take_exceptions(reader, indices.size());
  LowParts const low_parts(reader, indices.size(), parameter);

  std::size_t const longest = indices.size() * (max_unary + 1);
  auto const high_parts = reader.left().first(std::min(reader.left().size(), bytes_of(longest)));
  std::array<std::uint32_t, block_size + ones_slack> ones;
  std::size_t const found = kernels.ones(high_parts, 0, indices.size(), ones.data()).count;
  valid(found >= indices.size(), "high parts end after ", found, " of ", indices.size(), " gaps");
  std::size_t const bit = ones[indices.size() - 1];

  std::byte const* const lows = low_parts.data();
  std::uint64_t low_sum = 0;
  auto const start = static_cast<std::uint32_t>(next);
  if (indices.size() == block_size && parameter <= max_join_parameter) [[likely]] {
    // Less than 2^31.
    low_sum = kernels.join(lows, parameter, start, ones.data(), indices.data());
  } else {
    std::uint64_t const mask = (std::uint64_t{1} << parameter) - 1;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      std::uint64_t low;
      std::memcpy(&low, lows + i * parameter / 8, sizeof(low));
      low_sum += low >> i * parameter % 8 & mask;
      indices[i] = static_cast<std::uint32_t>(next + low_sum +
                                              (std::uint64_t{ones[i] - i} << parameter) + i);
    }
  }
  std::size_t const last = indices.size() - 1;
  std::uint64_t index = next + low_sum + (std::uint64_t{bit - last} << parameter) + last;
  valid(bit < longest, "high parts is ", bit + 1, " bits, must be at most ", longest);
  auto const packed = reader.take(bit / 8 + 1, "high parts");
  valid(std::uint8_t(packed.back()) >> (bit % 8) == 1, "padding of high parts is not 0");
  if ((tag & exceptions_flag) != 0) index += apply(exceptions, parameter, extent, indices);
  // Indices within a block only grow, so the last one speaks for all.
  valid(index < end, "index is ", index, ", must be below first_index + extent = ", end);
  return index + 1;
}

}  // namespace

std::size_t encode(IndexKernels const& kernels, std::span<const std::uint32_t> indices,
                   std::uint32_t first_index, std::uint32_t, std::span<std::byte> out) {
  std::byte* to = out.data();
  std::byte const* const end = to + out.size();
  std::uint32_t next = first_index;
  while (!indices.empty()) {
    auto const part = indices.first(std::min(block_size, indices.size()));
    Gaps const gaps(kernels, part, next);
    Plan const plan = plan_block(kernels, gaps);
    if (plan.bytes() > static_cast<std::size_t>(end - to)) return does_not_fit;
    *to++ = std::byte(plan.parameter | (plan.exceptions > 0 ? exceptions_flag : 0u));
    if (plan.exceptions > 0) to = put_exceptions(to, gaps, plan);
    to = put_low_parts(to, gaps, plan);
    to = put_high_parts(to, gaps, plan);
    next = part.back() + 1;  // wraps only behind the last index there can be
    indices = indices.subspan(part.size());
  }
  return static_cast<std::size_t>(to - out.data());
}

void decode(IndexKernels const& kernels, std::span<const std::byte> in, std::uint32_t first_index,
            std::uint32_t extent, std::span<std::uint32_t> indices) {
  Reader reader(in);
  std::uint64_t const end = std::uint64_t{first_index} + extent;
  std::uint64_t next = first_index;
  while (!indices.empty()) {
    auto const block = indices.first(std::min(block_size, indices.size()));
    next = decode_block(kernels, reader, next, end, extent, block);
    indices = indices.subspan(block.size());
  }
  valid(reader.left().empty(), "trailing bytes: ", reader.left().size(), ", must be 0");
}

std::size_t min_bytes(std::size_t count, std::size_t) { return blocks_of(count) + bytes_of(count); }

std::size_t max_bytes(std::size_t count, std::size_t) { return max_index_bytes(count); }

// Gaps are geometric: P(gap >= n) = (1 - density)^n, so that with q = (1 - density)^(2^b) a high
// part is q / (1 - q) on average. Exceptions are too rare to count.
double expected_bits(double density) {
  double const absent = std::log1p(-std::min(density, 1.0));
  double least = std::numeric_limits<double>::infinity();
  for (std::uint32_t parameter = 0; parameter <= max_parameter; ++parameter) {
    double const high = 1 / std::expm1(-std::ldexp(absent, static_cast<int>(parameter)));
    least = std::min(least, parameter + 1 + high);
  }
  // The byte of a block's parameter, and half a byte that fills up its high parts.
  return least + 12.0 / block_size;
}

}  // namespace sparsecomm::delta
