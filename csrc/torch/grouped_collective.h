// An allreduce of several tensors as one operation: all of them are reduced, or none.
//
// 1. Prepare each, and agree with the other ranks on all of them at once.
// 2. Allgather their payloads, which are more than an agreement has room for.
// 3. Run one after another, dense tensors as copies; what can be is exchanged together (fusion.h).
// 4. Commit, and copy those back.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/payload_allgather.h"
#include "tensor_collective.h"

namespace sparsecomm {

class GroupedCollective final : public Operation {
 public:
  static constexpr std::string_view name = "grouped allreduce";  // in proposals

  // The requests differ in their tensors only. Throws InvalidArgument where there are none, or one
  // of them cannot be served. The members are from the pool, and return to it if all goes well.
  GroupedCollective(std::vector<CollectiveRequest> requests, Communicator& communicator,
                    std::shared_ptr<CollectivePool> pool);

  // Of the operation that has ended: each tensor's result, see TensorCollective::release().
  std::vector<at::Tensor> release(bool good);

  Proposal prepare() override;
  // A line for itself, and one for each tensor.
  std::string description(Proposal const& proposal) const override;
  std::string changing_fields(std::span<const std::byte> payload) const override;
  void run(Channel& channel, Agreement const& agreement) override;
  Batch const* batch() const override { return &batch_of_one; }

 private:
  struct Member {
    std::shared_ptr<TensorCollective> collective;
    at::Tensor given = {}, target = {};  // a dense tensor, and an alias that its copy goes back to
    Proposal proposal = {};
  };

  std::shared_ptr<CollectivePool> pool_;
  bool inference_;
  std::vector<Member> members_;
  std::string text_;
  std::vector<PayloadAllgather::Part> payloads_;
  PayloadAllgather gather_;
  Fusion fusion_;
  std::vector<at::Tensor> results_;
};

}  // namespace sparsecomm
