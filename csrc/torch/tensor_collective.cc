#include "tensor_collective.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "coo_entries.h"
#include "engine/mismatch.h"
#include "engine/sparse_collectives.h"
#include "tensor_memory.h"

namespace sparsecomm {
namespace {

struct Element {
  at::ScalarType torch;
  DType ours;
  std::shared_ptr<TensorCollective> (*make)(Communicator&, AlgorithmOptions const&);
  at::Scalar (*neutral)(Reduction);
};

template <class T>
std::shared_ptr<TensorCollective> make_collective(Communicator&, AlgorithmOptions const&);

template <class T>
constexpr Element make_element(at::ScalarType torch) {
  return {torch, dtype_of<T>(), make_collective<T>,
          [](Reduction reduction) { return at::Scalar(neutral<accumulate_t<T>>(reduction)); }};
}

constexpr Element elements[] = {
    make_element<float>(at::kFloat),      make_element<double>(at::kDouble),
    make_element<Half>(at::kHalf),        make_element<BFloat16>(at::kBFloat16),
    make_element<std::int32_t>(at::kInt), make_element<std::int64_t>(at::kLong),
};

Element const& find_element(at::ScalarType dtype) {
  for (Element const& element : elements) {
    if (element.torch == dtype) return element;
  }
  throw InvalidArgument(
      concat("a tensor of dtype ", at::toString(dtype),
             " cannot be exchanged; convert it to one of float32, float64, float16, bfloat16, "
             "int32, int64"));
}

at::ScalarType torch_type(DType dtype) {
  for (Element const& element : elements) {
    if (element.ours == dtype) return element.torch;
  }
  throw InvalidArgument(concat("torch has no dtype ", name(dtype)));
}

// A number of 0 or more.
std::int64_t parse_number(std::string_view text) {
  std::int64_t number = -1;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  require(error == std::errc{} && end == text.data() + text.size() && number >= 0, "'", text,
          "' is no number of dimensions or entries");
  return number;
}

// As proposals have it: "[2, 3]".
std::vector<std::int64_t> parse_shape(std::string_view text) {
  constexpr std::size_t most_dimensions = 64;
  require(text.size() >= 2 && text.front() == '[' && text.back() == ']', "a tensor's shape is '",
          text, "'");
  std::string_view left = text.substr(1, text.size() - 2);
  std::vector<std::int64_t> sizes;
  while (!left.empty()) {
    std::string_view const number = left.substr(0, left.find(','));
    sizes.push_back(parse_number(number));
    left.remove_prefix(number.size());
    require(sizes.size() <= most_dimensions && (left.empty() || left.starts_with(", ")),
            "a tensor's shape is '", text, "'");
    left.remove_prefix(std::min<std::size_t>(2, left.size()));
  }
  return sizes;
}

constexpr std::size_t most_idle = 64;  // scratch for what programs have in flight at a time

struct Op {
  Fold fold;
  bool average;
};

Op find_op(std::string_view op) {
  if (op == "avg") return {Fold::sum, true};
  std::string known;
  for (ReductionEntry const& entry : reductions()) {
    if (entry.name == op) return {static_cast<Fold>(entry.id), false};
    known += concat(entry.name, ", ");
  }
  throw InvalidArgument(concat("op '", op, "' is unknown; choose one of ", known, "avg"));
}

// The caller's mode, on whichever thread runs the operation.
class ThreadState {
 public:
  explicit ThreadState(bool inference) : inference_(inference) {}

 private:
  c10::InferenceMode inference_;
  at::NoGradGuard no_grad_;
};

template <class T>
class TypedCollective final : public TensorCollective {
 public:
  using V = accumulate_t<T>;

  TypedCollective(Communicator& communicator, AlgorithmOptions const& options)
      : TensorCollective(torch_type(dtype_of<T>())),
        rank_(communicator.rank()),
        ranks_(communicator.size()),
        allreduce_(communicator, options) {}

  void bind(CollectiveRequest request) override {
    request.require_servable(ranks_);
    Key key{request.kind,     request.algorithm,      request.fold,
            request.average,  request.in_rank_order,  request.tensor.layout() == at::kStrided,
            by_rows(request), request.absent_is_zero, std::move(request.note),
            shape_of(request)};
    if (key_ != key) {
      key_.reset();
      configure(key);
      key_ = std::move(key);
    }
    inference_ = c10::InferenceMode::is_enabled();
    request_ = std::move(request);
  }

  Proposal prepare() override {
    ThreadState const state(inference_);
    if (key_->dense) {
      flat_ = request_.tensor.contiguous();
      allreduce_.bind(std::span(reinterpret_cast<T*>(flat_.mutable_data_ptr()),
                                static_cast<std::size_t>(flat_.numel())));
      return propose(allreduce_);
    }
    at::Tensor const& tensor = request_.tensor;
    if (key_->by_rows) {
      rows_.read(key_->shape, tensor);
      row_allreduce_.bind(rows_.view());
      return propose(row_allreduce_);
    }
    entries_.read(key_->shape, tensor.layout() == at::kSparse ? tensor : tensor.to_sparse());
    switch (key_->kind) {
      case CollectiveKind::allreduce:
        allreduce_.bind(entries_.view());
        return propose(allreduce_);
      case CollectiveKind::allgather:
        allgather_.bind(entries_.view());
        return propose(allgather_);
      case CollectiveKind::reduce_scatter:
        reduce_scatter_.bind(entries_.view());
        return propose(reduce_scatter_);
    }
    throw InvalidArgument(concat("collective ", int(key_->kind), " is unknown"));
  }

  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return proposed_->merge(into, other);
  }

  Fusible* fusible(std::span<const std::byte> payload) override {
    return proposed_->fusible(payload);
  }

  void run(Channel& channel, Agreement const& agreement) override {
    ThreadState const state(inference_);
    if (key_->by_rows) {
      row_allreduce_.run(channel, agreement);
      results_.push_back(make_coo<V>(key_->shape, dtype(), row_allreduce_.result()));
      return;
    }
    V const absent = neutral<V>(static_cast<Reduction>(key_->fold));
    V const divisor = key_->average ? static_cast<V>(ranks_) : V{1};
    switch (key_->kind) {
      case CollectiveKind::allreduce:
        allreduce_.run(channel, agreement);
        if (key_->dense) {
          write_back();
        } else {
          results_.push_back(
              make_coo<V>(key_->shape, dtype(), allreduce_.result(), absent, 0, divisor));
        }
        break;
      case CollectiveKind::allgather:
        allgather_.run(channel, agreement);
        for (SparseView<V> const& view : allgather_.result()) {
          results_.push_back(make_coo<V>(key_->shape, dtype(), {.sparse = view}, absent, 0, V{1},
                                         /*keeps_neutral=*/true));
        }
        break;
      case CollectiveKind::reduce_scatter: {
        reduce_scatter_.run(channel, agreement);
        std::vector<std::int64_t> sizes = key_->shape.sizes;
        sizes[0] /= ranks_;
        CooShape const region(sizes, key_->shape.sparse_dims);
        results_.push_back(make_coo<V>(region, dtype(), {.sparse = reduce_scatter_.result()},
                                       absent, region.extent * static_cast<std::uint64_t>(rank_),
                                       divisor));
        break;
      }
    }
  }

  std::vector<at::Tensor> release() override {
    entries_.release();
    rows_.release();
    flat_.reset();
    request_.tensor.reset();
    return std::exchange(results_, {});
  }

 private:
  // What the engine's operation was configured for.
  struct Key {
    CollectiveKind kind;
    AlgorithmEntry const* algorithm;
    Fold fold;
    bool average;
    bool in_rank_order;
    bool dense;
    bool by_rows;
    bool absent_is_zero;
    std::string note;
    CooShape shape;

    friend bool operator==(Key const&, Key const&) = default;
  };

  Proposal propose(Operation& operation) {
    proposed_ = &operation;
    return operation.prepare();
  }

  static CooShape shape_of(CollectiveRequest const& request) {
    at::Tensor const& tensor = request.tensor;
    if (request.by_numel) return {std::array{tensor.numel()}, 1};
    return {tensor.sizes(), tensor.layout() == at::kSparse ? tensor.sparse_dim() : tensor.dim()};
  }

  // Whether positions and values are gathered and reduced row by row: what the algorithms, which
  // reduce 32-bit indices and leave out absent ones, cannot do, and rows, of which they would send
  // and merge an index for each value.
  static bool by_rows(CollectiveRequest const& request) {
    if (request.kind != CollectiveKind::allreduce || request.algorithm != nullptr ||
        request.tensor.layout() != at::kSparse) {
      return false;
    }
    CooShape const shape = shape_of(request);
    return shape.row != 1 || !shape.indexable() ||
           (request.absent_is_zero && request.fold != Fold::sum);
  }

  void configure(Key const& key) {
    std::string vector = concat("layout=", key.dense ? "dense" : "sparse",
                                ";shape=", at::IntArrayRef(key.shape.sizes));
    if (!key.dense) vector += concat(";sparse dimensions=", key.shape.sparse_dims);
    if (!key.note.empty()) vector += ";" + key.note;
    if (key.by_rows) {
      return row_allreduce_.configure({std::move(vector), key.shape.count, key.shape.row, key.fold,
                                       key.average, key.absent_is_zero});
    }
    require(key.dense || key.shape.indexable(), "a tensor of shape ", key.shape.sizes, " has ",
            key.shape.extent, " entries, more than 2^32 - 2; split it");
    CollectiveConfig config{std::move(vector), key.shape.extent,
                            key.algorithm,     static_cast<Reduction>(key.fold),
                            key.average,       key.in_rank_order};
    switch (key.kind) {
      case CollectiveKind::allreduce:
        return allreduce_.configure(std::move(config));
      case CollectiveKind::allgather:
        return allgather_.configure(std::move(config));
      case CollectiveKind::reduce_scatter:
        return reduce_scatter_.configure(std::move(config), ranks_);
    }
  }

  void write_back() {
    at::Tensor const& tensor = request_.tensor;
    if (!flat_.is_same(tensor)) {
      tensor.detach().copy_(flat_);
    } else if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
    results_.push_back(tensor);
  }

  std::optional<Key> key_;
  CollectiveRequest request_;
  int rank_, ranks_;
  bool inference_ = false;
  at::Tensor flat_;  // a dense tensor's entries in order
  CooEntries<V> entries_;
  CooRows<T> rows_;
  AllreduceOperation<T> allreduce_;
  RowAllreduce<T> row_allreduce_;
  AllgatherOperation<V> allgather_;
  ReduceScatterOperation<V> reduce_scatter_;
  Operation* proposed_ = nullptr;  // the one of these that is bound
  std::vector<at::Tensor> results_;
};

template <class T>
std::shared_ptr<TensorCollective> make_collective(Communicator& communicator,
                                                  AlgorithmOptions const& options) {
  return std::make_shared<TypedCollective<T>>(communicator, options);
}

}  // namespace

bool can_exchange(at::ScalarType dtype) {
  return std::ranges::any_of(elements, [&](Element const& each) { return each.torch == dtype; });
}

CollectiveRequest CollectiveRequest::make(CollectiveKind kind, at::Tensor tensor,
                                          std::string_view algorithm, std::string_view op) {
  find_element(tensor.scalar_type());
  Op const found = find_op(op);
  require(!found.average || !c10::isIntegralType(tensor.scalar_type(), false), "op 'avg' of ",
          at::toString(tensor.scalar_type()), " is not defined; use sum");
  return {.kind = kind,
          .tensor = std::move(tensor),
          .algorithm = find_reducing(algorithm),
          .fold = found.fold,
          .average = found.average,
          .note = {}};
}

CollectiveRequest CollectiveRequest::neutral_for(std::string_view text) {
  auto const field = [text](std::string_view name, std::string_view otherwise = {}) {
    std::string_view const value = field_of(text, name);
    return value.empty() ? otherwise : value;
  };
  std::string_view const operation = field("operation"), dtype = field("dtype");
  bool const gathers = operation == allgather_name;
  require(gathers || operation == allreduce_name,
          "this rank has joined, and nothing can stand for ", "it in an operation '", operation,
          "'; let ranks join when all have ended theirs");
  auto const element = std::ranges::find_if(
      elements, [dtype](Element const& each) { return name(each.ours) == dtype; });
  require(element != std::end(elements), "dtype '", dtype, "' is unknown");
  std::vector<std::int64_t> const sizes = parse_shape(field("shape"));
  std::string_view const op = field("reduction", "sum");
  at::Tensor tensor;
  if (field("layout") == "dense") {
    // The numbers are another rank's, which has as many entries in memory.
    CooShape const shape(sizes, static_cast<std::int64_t>(sizes.size()));
    require(shape.indexable(), "a dense tensor of shape ", field("shape"));
    tensor =
        at::full(sizes, element->neutral(static_cast<Reduction>(find_op(op).fold)), element->torch);
  } else {
    std::int64_t const sparse = parse_number(field("sparse dimensions"));
    require(sparse <= static_cast<std::int64_t>(sizes.size()), "a tensor of shape ", field("shape"),
            " has ", sparse, " sparse dimensions");
    auto const options = at::TensorOptions(element->torch).layout(at::kSparse);
    auto const values = static_cast<std::int64_t>(sizes.size()) - sparse;
    tensor = at::_sparse_coo_tensor_with_dims(sparse, values, sizes, options);
  }
  return make(gathers ? CollectiveKind::allgather : CollectiveKind::allreduce, std::move(tensor),
              field("algorithm", "auto"), op);
}

void CollectiveRequest::require_servable(int ranks) const {
  require(tensor.device().is_cpu(), "a tensor on ", tensor.device().str(),
          " cannot be exchanged; pass tensor.cpu() and copy the result back");
  bool const dense = tensor.layout() == at::kStrided;
  bool const compressed = tensor.layout() == at::kSparseCsr;
  require(dense || compressed || tensor.layout() == at::kSparse, "a tensor of layout ",
          concat(tensor.layout()), " cannot be exchanged; pass tensor.to_sparse()");
  require(!compressed || (tensor.dim() == 2 && tensor.dense_dim() == 0), "a CSR tensor of shape ",
          tensor.sizes(), " is no plain matrix; pass tensor.to_sparse()");
  require_memory(tensor);
  if (kind == CollectiveKind::allreduce) {
    if (!dense) return;
    require(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "a tensor of shape ",
            tensor.sizes(), " and strides ", tensor.strides(),
            " has several entries in one place; pass tensor.contiguous()");
    require(!tensor.is_inference() || c10::InferenceMode::is_enabled(),
            "an inference tensor can be reduced in inference mode only; pass tensor.clone()");
    return;
  }
  require(!dense, "a dense tensor of shape ", tensor.sizes(),
          " was given where a sparse one is needed; pass tensor.to_sparse()");
  if (kind == CollectiveKind::reduce_scatter) {
    require(compressed || tensor.sparse_dim() > 0, "a tensor of shape ", tensor.sizes(),
            " without sparse dimensions cannot be scattered");
    require(tensor.size(0) % ranks == 0, "reduce_scatter_sparse: dimension 0 of shape ",
            tensor.sizes(), " cannot be split evenly between ", ranks,
            " ranks; pad it to a multiple of ", ranks);
  }
}

std::shared_ptr<TensorCollective> TensorCollective::make(at::ScalarType dtype,
                                                         Communicator& communicator,
                                                         AlgorithmOptions const& options) {
  return find_element(dtype).make(communicator, options);
}

std::shared_ptr<TensorCollective> CollectivePool::take(at::ScalarType dtype,
                                                       Communicator& communicator) {
  std::lock_guard const lock(mutex_);
  for (auto operation = operations_.rbegin(); operation != operations_.rend(); ++operation) {
    if ((*operation)->dtype() != dtype) continue;
    auto const found = std::move(*operation);
    operations_.erase(std::next(operation).base());
    return found;
  }
  return TensorCollective::make(dtype, communicator, options_);
}

void CollectivePool::give(std::shared_ptr<TensorCollective> operation) {
  std::lock_guard const lock(mutex_);
  if (operations_.size() == most_idle) operations_.erase(operations_.begin());
  operations_.push_back(std::move(operation));
}

}  // namespace sparsecomm
