// An algorithm's exchange alone: of a selection that is at hand, without gradient and residual. For
// measurements; what the algorithm rejects is lost.
#pragma once

#include <memory>

#include "engine/communicator.h"
#include "engine/payload.h"

namespace sparsecomm {

template <class V>
class SelectionExchange final : public Operation {
 public:
  // `k`: entries wanted in a result that is cut. Throws InvalidArgument where the algorithm
  // exchanges no selections.
  SelectionExchange(AlgorithmEntry const& algorithm, std::uint64_t extent, std::uint64_t k,
                    AlgorithmOptions const& options, Services const& services)
      : extent_(extent),
        k_(k),
        text_(concat("operation=exchange of a selection;algorithm=", algorithm.name,
                     ";numel=", extent, ";k=", k)) {
    require(algorithm.sparse, "algorithm ", algorithm.name, " exchanges no selections");
    allreduce_ = make_sparse_allreduce<V>(algorithm, options, services);
  }

  // Of the next submission; its memory stays until that has ended.
  void bind(SparseView<V> selection) { selection_ = selection; }
  // Of the last one's result.
  std::uint64_t result_nnz() const { return result_nnz_; }

  Proposal prepare() override {
    entries_ = EntryCounts(selection_.nnz());
    return {.text = text_,
            .changing = Digest().add(step_).value(),
            .step = step_,
            .payload = payload_of(entries_)};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return merge_payload<EntryCounts>(into, other, extent_);
  }
  std::string changing_fields(std::span<const std::byte> /*payload*/) const override {
    return concat(";step=", step_);
  }
  void run(Channel& channel, Agreement const& agreement) override {
    std::uint64_t const most = read_payload<EntryCounts>(agreement.payload).most;
    auto const result = allreduce_->run(channel, selection_, {extent_, k_, most, step_++});
    result_nnz_ = result.reduced.nnz();
  }

 private:
  std::uint64_t extent_, k_;
  std::string text_;
  std::uint64_t step_ = 0;
  std::uint64_t result_nnz_ = 0;
  SparseView<V> selection_;
  EntryCounts entries_;
  std::unique_ptr<SparseAllreduce<V>> allreduce_;
};

}  // namespace sparsecomm
