#include "grouped_collective.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <ios>
#include <utility>

#include "engine/mismatch.h"
#include "tensor_memory.h"

namespace sparsecomm {

GroupedCollective::GroupedCollective(std::vector<CollectiveRequest> requests,
                                     Communicator& communicator,
                                     std::shared_ptr<CollectivePool> pool)
    : pool_(std::move(pool)),
      inference_(c10::InferenceMode::is_enabled()),
      fusion_(communicator.fusion_bytes()) {
  require(!requests.empty(), "grouped_allreduce: no tensors are given; give one or more");
  at::NoGradGuard const no_grad;
  CollectiveRequest const& first = requests.front();
  text_ = concat("operation=", name, ";tensors=", requests.size(),
                 ";reduction=", first.average ? "avg" : sparsecomm::name(first.fold),
                 ";algorithm=", first.algorithm != nullptr ? first.algorithm->name : "auto",
                 ";fusion_bytes=", communicator.fusion_bytes());
  for (CollectiveRequest& request : requests) {
    request.require_servable(communicator.size());
    Member member{.collective = pool_->take(request.tensor.scalar_type(), communicator)};
    if (request.tensor.layout() == at::kStrided) {
      member.given = request.tensor;
      member.target = request.tensor.detach();
      request.tensor = member.target.clone(at::MemoryFormat::Contiguous);
    }
    member.collective->bind(std::move(request));
    members_.push_back(std::move(member));
  }
}

// Step 1.
Proposal GroupedCollective::prepare() {
  payloads_.clear();
  Digest key;
  key.add(std::string_view(text_));
  Proposal all{.text = text_};
  for (Member& member : members_) {
    member.proposal = member.collective->prepare();
    key.add(member.proposal.key).add(member.proposal.payload.size());
    all.finite = all.finite && member.proposal.finite;
    payloads_.push_back({.operation = member.collective.get(), .payload = member.proposal.payload});
  }
  all.key = key.value();
  return all;
}

std::string GroupedCollective::description(Proposal const& proposal) const {
  std::string lines(proposal.text);
  for (Member const& member : members_) lines += concat('\n', member.proposal.text);
  return lines;
}

// What differs between tensors of one place, in short; a hash stands for all that is not shown.
std::string GroupedCollective::changing_fields(std::span<const std::byte> /*payload*/) const {
  constexpr std::size_t room = 3500;
  auto const hash = [](std::uint64_t key) { return concat("#", std::hex, key >> 40); };
  std::string text;
  Digest rest;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Proposal const& proposal = members_[i].proposal;
    if (text.size() < room) {
      text += concat(";tensor ", i, "=", field_of(proposal.text, "shape"), " ",
                     field_of(proposal.text, "dtype"), " ", field_of(proposal.text, "layout"), " ",
                     hash(proposal.key));
    } else {
      rest.add(proposal.key);
    }
  }
  return concat(text, ";other tensors=", hash(rest.value()));
}

void GroupedCollective::run(Channel& channel, Agreement const& agreement) {
  // Step 2.
  gather_.run(channel, Phase::agree, payloads_);
  require<Mismatch>(std::ranges::all_of(payloads_, &PayloadAllgather::Part::agrees),
                    "ranks disagree about what the tensors of a group hold");
  // Step 3.
  fusion_.clear();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    fusion_.add(members_[i].collective->fusible(payloads_[i].merged));
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    members_[i].collective->run(channel, {.all_finite = agreement.all_finite,
                                          .payload = payloads_[i].merged,
                                          .fused = fusion_.led_by(i)});
    results_.push_back(std::move(members_[i].collective->release().front()));
  }
  // Step 4. What may fail comes before.
  for (Member const& member : members_) {
    if (member.given.defined()) require_memory(member.target);
  }
  agreement.commit(channel);
  c10::InferenceMode const mode(inference_);
  at::NoGradGuard const no_grad;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Member const& member = members_[i];
    if (!member.given.defined()) continue;
    member.target.copy_(results_[i]);
    results_[i] = member.given;
  }
}

std::vector<at::Tensor> GroupedCollective::release(bool good) {
  for (Member& member : std::exchange(members_, {})) {
    member.collective->release();
    if (good) pool_->give(std::move(member.collective));
  }
  return std::exchange(results_, {});
}

}  // namespace sparsecomm
