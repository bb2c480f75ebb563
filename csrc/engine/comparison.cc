#include "engine/comparison.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "engine/mismatch.h"
#include "engine/stall.h"

namespace sparsecomm {
namespace {

// A proposal on the wire; the payload follows.
struct Fingerprint {
  std::uint64_t key;
  std::uint64_t changing;
  std::uint8_t finite;
  std::uint8_t ends_batch;
  std::uint8_t requests;
  std::uint8_t kind;  // what Result::alike is about
  Intent intent;
};
static_assert(sizeof(Fingerprint) == 24);

constexpr std::size_t max_proposal_bytes = 4096;

bool is_last_of_batch(Prepared const& prepared) {
  if (prepared.intent != Intent::go) return false;
  Batch const* const batch = prepared.operation->batch();
  return batch != nullptr && batch->left() == 1;
}

}  // namespace

Prepared prepare(Operation* operation) {
  Prepared prepared;
  if (operation == nullptr) return prepared;
  prepared.operation = operation;
  try {
    prepared.proposal = operation->prepare();
    std::size_t const bytes = prepared.proposal.payload.size();
    require<Error>(bytes <= max_payload_bytes, "a payload of ", bytes, " bytes; there is room for ",
                   max_payload_bytes);
    prepared.intent = Intent::go;
  } catch (...) {
    prepared.intent = Intent::failed;
    prepared.proposal = {};
    prepared.failure = what_of(std::current_exception());
  }
  return prepared;
}

std::exception_ptr Comparison::run_first(Channel& channel, Operation* first) {
  Nothing nothing;
  Operation& operation = first != nullptr ? *first : nothing;
  try {
    operation.run(channel, run(channel, prepare(&operation)).agreement);
  } catch (AgreedError const&) {
    return std::current_exception();
  }
  return nullptr;
}

void Comparison::show(Proposal const& proposal, std::string_view name, std::size_t others) const {
  if (watch_ != nullptr) watch_->propose(proposal.text, proposal.step, name, others);
}

std::span<const FrameView> Comparison::allgather(Channel& channel, Phase phase,
                                                 std::span<const std::byte> payload,
                                                 std::size_t capacity) {
  frame_.resize(header_bytes + max_proposal_bytes);
  std::size_t const length = encode_bytes(channel.stamp(), payload, frame_);
  return gather_.run(channel, phase, std::span(frame_).first(length), header_bytes + capacity);
}

Comparison::Result Comparison::run(Channel& channel, Prepared const& prepared,
                                   std::string_view name, bool same_name) {
  auto const& [operation, intent, proposal, failure, priority] = prepared;
  std::uint64_t const steps = steps_broken_off();
  show(proposal, name);
  ObservedStage const agreeing(operation ? operation->observer() : nullptr, Stage::agree);
  Fingerprint const own{
      .key = proposal.key,
      .changing = Digest()
                      .add(proposal.changing)
                      .add(priority)
                      .add(steps)
                      .add(same_name ? "" : name)
                      .value(),
      .finite = proposal.finite,
      .ends_batch = is_last_of_batch(prepared),
      .requests = take_request(),
      .kind = static_cast<std::uint8_t>(prepared.ends_alone() + 2 * proposal.payload_is_known),
      .intent = intent};

  std::array<std::byte, sizeof own + max_payload_bytes> fingerprint{};
  std::memcpy(fingerprint.data(), &own, sizeof own);
  std::ranges::copy(proposal.payload, fingerprint.begin() + sizeof own);
  auto const frames = allgather(channel, Phase::agree,
                                std::span(fingerprint).first(sizeof own + proposal.payload.size()),
                                fingerprint.size());
  auto const payload = std::span(payload_).first(proposal.payload.size());
  std::ranges::fill(payload, std::byte{0});
  Result result{.agreement = {.payload = payload, .ends_batch = true}};
  Agreement& agreement = result.agreement;
  bool agreed = true;
  bool requested = false;
  for (int rank = 0; rank < channel.size(); ++rank) {
    Fingerprint other{};
    channel.decode_from(rank, [&] {
      auto const bytes = frames[rank].values;
      require<MalformedFrame>(bytes.size() >= sizeof other && bytes.size() <= fingerprint.size(),
                              "a fingerprint of ", bytes.size(), " bytes");
      std::memcpy(&other, bytes.data(), sizeof other);
      require<MalformedFrame>(other.intent <= Intent::cancelled, "an intent of ",
                              static_cast<std::uint32_t>(other.intent));
      bool same = intent == Intent::go && other.intent == Intent::go && other.key == own.key;
      if (same) {
        auto const arrived = bytes.subspan(sizeof other);
        require<MalformedFrame>(arrived.size() == payload.size(), "a payload of ", arrived.size(),
                                " bytes instead of ", payload.size());
        same = operation->merge(payload, arrived);
      }
      agreed = agreed && same && other.changing == own.changing;
    });
    agreement.all_finite = agreement.all_finite && other.finite != 0;
    agreement.ends_batch = agreement.ends_batch && other.ends_batch != 0;
    requested = requested || other.requests != 0;
    result.alike = result.alike && other.kind == own.kind;
    intents_[rank] = static_cast<std::uint32_t>(other.intent);
  }
  if (requested) add_requested();
  if (agreed) return result;

  std::string const explanation =
      intent == Intent::go
          ? shorten_values(concat(proposal.text, operation->changing_fields(payload),
                                  ";priority=", priority, ";steps_broken_off=", steps,
                                  same_name ? "" : concat(";name=", name)))
          : failure;
  explain(channel, std::string_view(explanation).substr(0, max_proposal_bytes),
          same_name ? name : std::string_view());
}

void Comparison::explain(Channel& channel, std::string_view own, std::string_view name) {
  auto const explained =
      allgather(channel, Phase::explain, std::as_bytes(std::span(own)), max_proposal_bytes);
  std::vector<std::string> texts;
  std::vector<int> cancellers;
  std::string const quoted = name.empty() ? "" : concat(" '", name, "'");
  std::string message;
  for (int rank = 0; rank < channel.size(); ++rank) {
    auto const bytes = explained[rank].values;
    std::string const text(reinterpret_cast<char const*>(bytes.data()), bytes.size());
    switch (static_cast<Intent>(intents_[rank])) {
      case Intent::go:
        texts.push_back(text);
        break;
      case Intent::failed:
        message += concat(message.empty() ? "" : "; ", "rank ", rank, " failed before the exchange",
                          name.empty() ? "" : " of", quoted, ": ", text);
        break;
      case Intent::cancelled:
        cancellers.push_back(rank);
        break;
    }
  }
  if (message.empty() && !cancellers.empty()) {
    throw Cancelled(concat("the operation", quoted, " was cancelled on ", join_ranks(cancellers)));
  }
  if (message.empty()) {
    message =
        concat("ranks disagree", name.empty() ? "" : " about", quoted, ": ", differences(texts),
               "; give every rank the same", name.empty() ? ", in the same order of calls" : "");
  }
  throw Mismatch(message);
}

}  // namespace sparsecomm
