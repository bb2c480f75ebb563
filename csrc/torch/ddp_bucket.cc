#include "ddp_bucket.h"

#include <torch/csrc/autograd/graph_task.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace sparsecomm {
namespace {

// Reads protected members, by pointers that a derived class may form.
class ReducerAccess final : public c10d::Reducer {
 public:
  // Null where the bucket is not the reducer's, as the zeros that a joined rank contributes.
  static auto const* find(c10d::GradBucket const& bucket, c10d::Reducer const& reducer) {
    auto const& buckets = reducer.*(&ReducerAccess::buckets_);
    std::size_t const index = bucket.getIndex();
    bool const own = index < buckets.size() && buckets[index].gradients.is_same(bucket.getBuffer());
    return own ? &buckets[index] : nullptr;
  }
  static bool exposes_views(c10d::Reducer const& reducer) {
    return reducer.*(&ReducerAccess::gradient_as_bucket_view_);
  }
  // Returns which results of a joined rank's bucket DDP will drop, as far as this rank can know. It
  // drops those of parameters that no rank has used, by a map that this rank adds to as the last
  // step has left it.
  static std::vector<bool> may_be_dropped(c10d::GradBucket const& bucket,
                                          c10d::Reducer const& reducer) {
    std::vector<std::size_t> const& indices =
        (reducer.*(&ReducerAccess::buckets_)).at(bucket.getIndex()).variable_indices;
    bool const drops = reducer.*(&ReducerAccess::find_unused_parameters_) ||
                       reducer.*(&ReducerAccess::static_graph_);
    std::vector<bool> dropped(indices.size());
    if (!drops) return dropped;
    at::Tensor const used = (reducer.*(&ReducerAccess::local_used_map_dev_)).cpu();
    for (std::size_t i = 0; i < indices.size(); ++i) {
      dropped[i] = used.const_data_ptr<int>()[indices[i]] == 0;
    }
    return dropped;
  }
};

}  // namespace

bool is_bucket_of(c10d::GradBucket const& bucket, c10d::Reducer const& reducer) {
  return ReducerAccess::find(bucket, reducer) != nullptr;
}

Bucket to_bucket(c10d::GradBucket& bucket, c10d::Reducer const* reducer) {
  at::Tensor const& buffer = bucket.getBuffer();
  Bucket result{.index = bucket.getIndex(),
                .last = bucket.isLast(),
                .buffer = buffer,
                .parameters = bucket.getParameters(),
                .gradients = {}};
  auto const* const own = reducer ? ReducerAccess::find(bucket, *reducer) : nullptr;
  result.joined = own == nullptr && torch::autograd::get_current_graph_task_id() == -1;
  if (result.joined && reducer) {  // its grads, of its own last step, say nothing
    result.unused = ReducerAccess::may_be_dropped(bucket, *reducer);
  } else {
    result.of_grads = true;
    for (at::Tensor const& parameter : result.parameters) {
      result.unused.push_back(!parameter.grad().defined());
    }
  }
  // DDP brings a sparse gradient in a bucket of its own, without a view of it.
  if (buffer.is_sparse()) {
    result.gradients = {buffer};
    return result;
  }
  std::vector<at::Tensor> const slices = bucket.getGradients();
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (result.parameters[i].is_complex()) {  // in a real buffer; what takes it refuses it
      result.gradients.push_back(slices[i]);
      result.results.push_back(slices[i]);
      continue;
    }
    Layout const now(result.parameters[i]);
    if (own == nullptr) {
      at::Tensor const& gradient = result.parameters[i].grad();
      bool const shown =
          gradient.defined() && gradient.has_storage() && gradient.is_alias_of(buffer);
      result.gradients.push_back(shown ? gradient : now.view(slices[i]));
      result.results.push_back(result.gradients.back());
      continue;
    }
    // With gradient_as_bucket_view DDP reads the view that it wrote; without, it makes another, by
    // the parameter's strides of now. So it does if the conversion of a model, whose gradients go
    // along, has given the view a memory of its own.
    at::Tensor const& view = own->bucket_views_in[i];
    bool const in_bucket = view.is_alias_of(buffer);
    bool const read_as_written =
        in_bucket && (ReducerAccess::exposes_views(*reducer) || now.fits(view));
    result.gradients.push_back(view);
    result.results.push_back(read_as_written ? view : now.view(slices[i]));
  }
  return result;
}

}  // namespace sparsecomm
