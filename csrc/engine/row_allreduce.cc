#include "engine/row_allreduce.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "sparse/reduction.h"

namespace sparsecomm {
namespace {

constexpr std::string_view names[] = {"sum", "product", "min", "max", "band", "bor", "bxor"};

template <class V, class F>
void visit_fold(Fold fold, F&& f) {
  if constexpr (std::is_integral_v<V>) {
    switch (fold) {
      case Fold::band:
        return f([](V a, V b) { return a & b; });
      case Fold::bor:
        return f([](V a, V b) { return a | b; });
      case Fold::bxor:
        return f([](V a, V b) { return a ^ b; });
      default:
        break;
    }
  }
  visit_reduction<V>(static_cast<Reduction>(fold), std::forward<F>(f));
}

template <class T>
T load(std::byte const* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::size_t position_bytes(std::uint64_t count) {
  return count <= std::numeric_limits<std::uint32_t>::max() ? 4 : 8;
}

}  // namespace

std::string_view name(Fold fold) { return names[static_cast<std::size_t>(fold)]; }

template <class T>
void RowAllreduce<T>::configure(RowConfig config) {
  std::string_view const op = config.average ? "avg" : name(config.fold);
  bool const defined = std::is_integral_v<T> ? !config.average : config.fold <= Fold::max;
  require(defined && (!config.average || config.fold == Fold::sum), "allreduce: ", op,
          " is not defined for ", name(dtype_of<T>()));
  text_ = concat("operation=allreduce;dtype=", name(dtype_of<T>()), ";", config.vector,
                 ";reduction=", op, ";absent rows=", config.absent_is_zero ? "zero" : "left out",
                 ";form=rows");
  config_ = std::move(config);
}

template <class T>
Proposal RowAllreduce<T>::prepare() {
  require(contribution_.values.size() == contribution_.positions.size() * config_.width,
          "allreduce: ", contribution_.values.size(), " values do not make ",
          contribution_.positions.size(), " rows of ", config_.width);
  return {.text = text_};
}

template <class T>
void RowAllreduce<T>::run(Channel& channel, Agreement const& /*agreement*/) {
  unpack(channel, gather_.run(channel, pack()));
  unite_positions();
  visit_fold<V>(config_.fold, [&](auto combine) { reduce(combine, channel.size()); });
}

template <class T>
std::span<const std::byte> RowAllreduce<T>::pack() {
  auto const& [positions, values] = contribution_;
  std::size_t const before = positions.size() * position_bytes(config_.count);
  auto const packed = packed_.take(before + values.size_bytes());
  if (position_bytes(config_.count) == 4) {
    for (std::size_t i = 0; i < positions.size(); ++i) {
      auto const position = static_cast<std::uint32_t>(positions[i]);
      std::memcpy(packed.data() + 4 * i, &position, 4);
    }
  } else if (!positions.empty()) {
    std::memcpy(packed.data(), positions.data(), before);
  }
  if (!values.empty()) std::memcpy(packed.data() + before, values.data(), values.size_bytes());
  return packed;
}

template <class T>
void RowAllreduce<T>::unpack(Channel& channel,
                             std::span<const std::span<const std::byte>> strings) {
  std::size_t const wide = position_bytes(config_.count);
  std::size_t const row_bytes = wide + config_.width * sizeof(T);
  gathered_.clear();
  arrived_.clear();
  for (int rank = 0; rank < channel.size(); ++rank) {
    channel.decode_from(rank, [&] {
      auto const bytes = strings[static_cast<std::size_t>(rank)];
      require<MalformedFrame>(bytes.size() % row_bytes == 0, bytes.size(),
                              " bytes are not a multiple of the ", row_bytes, " of a row");
      std::size_t const rows = bytes.size() / row_bytes;
      std::size_t const begin = gathered_.size();
      for (std::size_t i = 0; i < rows; ++i) {
        std::byte const* const from = bytes.data() + i * wide;
        std::uint64_t const position =
            wide == 4 ? load<std::uint32_t>(from) : load<std::uint64_t>(from);
        require<MalformedFrame>(position < config_.count && (i == 0 || position > gathered_.back()),
                                "position ", position, " is out of order or not below ",
                                config_.count);
        gathered_.push_back(position);
      }
      arrived_.push_back({begin, gathered_.size(), bytes.subspan(rows * wide)});
    });
  }
}

// Merges neighbouring ranks' lists until one is left: O(n log P).
template <class T>
void RowAllreduce<T>::unite_positions() {
  positions_.assign(gathered_.begin(), gathered_.end());
  bounds_.assign(1, 0);
  for (Arrived const& arrived : arrived_) bounds_.push_back(arrived.end);
  while (bounds_.size() > 2) {
    merged_.resize(positions_.size());
    merged_bounds_.assign(1, 0);
    auto out = merged_.begin();
    for (std::size_t i = 0; i + 1 < bounds_.size(); i += 2) {
      std::size_t const last = std::min(i + 2, bounds_.size() - 1);
      auto const at = [&](std::size_t bound) {
        return positions_.begin() + static_cast<std::ptrdiff_t>(bounds_[bound]);
      };
      out = std::set_union(at(i), at(i + 1), at(i + 1), at(last), out);
      merged_bounds_.push_back(static_cast<std::size_t>(out - merged_.begin()));
    }
    merged_.resize(merged_bounds_.back());
    positions_.swap(merged_);
    bounds_.swap(merged_bounds_);
  }
}

template <class T>
template <class Combine>
void RowAllreduce<T>::reduce(Combine combine, int ranks) {
  std::size_t const width = config_.width;
  contributors_.assign(positions_.size(), 0);
  values_.resize(positions_.size() * width);
  for (Arrived const& arrived : arrived_) {
    std::byte const* from = arrived.bytes.data();
    std::size_t row = 0;
    for (std::size_t i = arrived.begin; i < arrived.end; ++i, ++row) {
      while (positions_[row] != gathered_[i]) ++row;
      V* const out = values_.data() + row * width;
      if (contributors_[row]++ == 0) {
        for (std::size_t j = 0; j < width; ++j, from += sizeof(T)) {
          out[j] = static_cast<V>(load<T>(from));
        }
      } else {
        for (std::size_t j = 0; j < width; ++j, from += sizeof(T)) {
          out[j] = combine(out[j], static_cast<V>(load<T>(from)));
        }
      }
    }
  }
  if (config_.absent_is_zero && config_.fold != Fold::sum) {
    for (std::size_t row = 0; row < positions_.size(); ++row) {
      if (contributors_[row] == static_cast<std::uint32_t>(ranks)) continue;
      for (V& value : std::span(values_).subspan(row * width, width)) {
        value = combine(value, V{0});
      }
    }
  }
  if (config_.average) {
    for (V& value : values_) value /= static_cast<V>(ranks);
  }
}

template class RowAllreduce<float>;
template class RowAllreduce<double>;
template class RowAllreduce<Half>;
template class RowAllreduce<BFloat16>;
template class RowAllreduce<std::int32_t>;
template class RowAllreduce<std::int64_t>;

}  // namespace sparsecomm
