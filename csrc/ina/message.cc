#include "ina/message.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "ina/admission.h"
#include "wire/checksum.h"

namespace sparsecomm {
namespace {

constexpr std::size_t number_bytes = sizeof(std::uint32_t);

// Follows the header of a refusal; the accused workers and the text follow it.
struct RefusalRecord {
  std::uint32_t reason;
  std::uint32_t accused;
  std::uint32_t text_bytes;
  std::uint32_t reserved;  // zero
};
static_assert(sizeof(RefusalRecord) == 16);

// Throws MalformedFrame, naming the field, unless `holds`.
template <class... Parts>
void field(bool holds, std::string_view name, std::uint64_t value, Parts const&... bound) {
  require<MalformedFrame>(holds, "aggregation message: ", name, " is ", value, ", must be ",
                          bound...);
}

template <class T>
T load(std::byte const* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// The parts as they lie: the blocks, whose sizes are multiples of a stripe of the checksum, may be
// in two pieces.
std::uint64_t checksum_of(InaHeader header, std::span<const std::byte> body,
                          std::span<const std::byte> blocks,
                          std::span<const std::byte> more_blocks = {}) {
  header.checksum = 0;
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(&header, 1)));
  checksum.add(body);
  checksum.add(blocks);
  checksum.add(more_blocks);
  return checksum.value();
}

void check_checksum(InaHeader const& header, std::span<const std::byte> body,
                    std::span<const std::byte> blocks) {
  std::uint64_t const checksum = checksum_of(header, body, blocks);
  field(header.checksum == checksum, "checksum", header.checksum, checksum,
        " as computed over its ", sizeof(InaHeader) + body.size() + blocks.size(), " bytes");
}

InaPlanRecord record_of(InaPlan const& plan) {
  return {plan.elements,
          plan.purpose,
          plan.block_bytes,
          plan.workers,
          plan.window,
          std::uint8_t(plan.type),
          std::uint8_t(plan.reduction),
          std::uint8_t(plan.order),
          {}};
}

InaPlan parse_plan(std::span<const std::byte> in) {
  field(in.size() >= sizeof(InaPlanRecord), "length behind the header", in.size(),
        "at least the plan's ", sizeof(InaPlanRecord), " in round 0");
  auto const record = load<InaPlanRecord>(in.data());
  for (std::uint8_t const byte : record.reserved) field(byte == 0, "plan's reserved", byte, "0");
  InaPlan const plan{.elements = record.elements,
                     .purpose = record.purpose,
                     .block_bytes = record.block_bytes,
                     .workers = record.workers,
                     .window = record.window,
                     .type = ElementType(record.type),
                     .reduction = Reduction(record.reduction),
                     .order = CombineOrder(record.order)};
  std::string const text = problem(plan);
  require<MalformedFrame>(text.empty(), "aggregation message: plan: ", text);
  return plan;
}

struct Body {
  std::span<const std::byte> numbers, blocks;
};

// Checks what contributions and updates share, up to the checksum.
Body check_body(InaHeader const& h, std::span<const std::byte> in, std::size_t plan_bytes,
                InaPlan const& plan, InaExpected const& expected) {
  field(h.operation == expected.operation, "operation", h.operation, expected.operation);
  field(h.round == expected.round, "round", h.round, expected.round);
  field(h.reserved == 0, "reserved", h.reserved, "0");
  field(h.numbers <= plan.window, "numbers", h.numbers, "at most the window ", int(plan.window));
  std::uint64_t const all = expected.blocks->all_bits();
  field((h.bitmap & ~all) == 0, "bitmap", h.bitmap, "within ", all, ", the ",
        expected.blocks->size(), " blocks of round ", expected.round);
  std::size_t const numbers = h.numbers * number_bytes;
  std::size_t const count = static_cast<std::size_t>(std::popcount(h.bitmap));
  std::size_t const size = sizeof(h) + plan_bytes + numbers + count * plan.block_bytes;
  field(in.size() == size, "length", in.size(), size, " for ", int(h.numbers), " numbers and ",
        count, " blocks of ", plan.block_bytes, " bytes");
  auto const body = in.subspan(sizeof(h), plan_bytes + numbers);
  auto const blocks = in.subspan(sizeof(h) + body.size());
  check_checksum(h, body, blocks);
  return {body.subspan(plan_bytes), blocks};
}

// `place`: of the numbers in the head, whose front up to there is written, the header excepted.
InaMessage make_message(InaHeader header, BlockList const& numbers, std::size_t place,
                        std::span<const std::byte> blocks, std::span<const std::byte> more_blocks,
                        std::span<std::byte> head) {
  auto const bytes = std::as_bytes(numbers.numbers());
  require(head.size() >= place + bytes.size(), "a head of ", place + bytes.size(),
          " bytes does not fit into ", head.size());
  if (!bytes.empty()) std::memcpy(head.data() + place, bytes.data(), bytes.size());
  head = head.first(place + bytes.size());
  header.numbers = static_cast<std::uint8_t>(numbers.size());
  header.checksum = checksum_of(header, head.subspan(sizeof(header)), blocks, more_blocks);
  std::memcpy(head.data(), &header, sizeof(header));
  InaMessage message;
  message.add(head);
  message.add(blocks);
  message.add(more_blocks);
  return message;
}

}  // namespace

void check_block_number(std::uint32_t number, std::uint64_t least, std::uint64_t most) {
  field(number >= least && number < most, "block number", number, least, " to ", most, " - 1");
}

BlockList parse_increasing(std::span<const std::byte> bytes, InaPlan const& plan,
                           BlockList const& round) {
  BlockList list;
  std::uint64_t least = round.empty() ? 0 : std::uint64_t{round.back()} + 1;
  for (; !bytes.empty(); bytes = bytes.subspan(number_bytes)) {
    auto const number = load<std::uint32_t>(bytes.data());
    check_block_number(number, least, plan.blocks());
    list.push_back(number);
    least = std::uint64_t{number} + 1;
  }
  return list;
}

std::size_t InaMessage::size() const {
  std::size_t size = 0;
  for (auto const& piece : pieces()) size += piece.size();
  return size;
}

InaMessage encode_contribution(InaHeader header, InaPlan const& plan, BlockList const& votes,
                               std::span<const std::byte> blocks,
                               std::span<const std::byte> more_blocks, std::span<std::byte> head) {
  header.kind = InaKind::contribution;
  std::size_t place = sizeof(header);
  if (header.round == 0) {
    InaPlanRecord const record = record_of(plan);
    require(head.size() >= place + sizeof(record), "a plan does not fit into a head of ",
            head.size(), " bytes");
    std::memcpy(head.data() + place, &record, sizeof(record));
    place += sizeof(record);
  }
  return make_message(header, votes, place, blocks, more_blocks, head);
}

InaMessage encode_update(InaHeader header, BlockList const& next, std::span<const std::byte> blocks,
                         std::span<std::byte> head) {
  header.kind = InaKind::update;
  return make_message(header, next, sizeof(header), blocks, {}, head);
}

std::vector<std::byte> encode_refusal(std::uint32_t operation, Refusal const& refusal) {
  std::string_view const text = std::string_view(refusal.text).substr(0, most_refusal_text);
  RefusalRecord const record{std::uint32_t(refusal.reason),
                             static_cast<std::uint32_t>(refusal.accused.size()),
                             static_cast<std::uint32_t>(text.size()), 0};
  std::vector<std::byte> out(sizeof(InaHeader) + sizeof(record) +
                             refusal.accused.size() * number_bytes + text.size());
  auto place = out.begin() + sizeof(InaHeader);
  auto const append = [&](std::span<const std::byte> part) {
    place = std::copy(part.begin(), part.end(), place);
  };
  append(std::as_bytes(std::span(&record, 1)));
  for (int const worker : refusal.accused) {
    auto const number = static_cast<std::uint32_t>(worker);
    append(std::as_bytes(std::span(&number, 1)));
  }
  append(std::as_bytes(std::span(text)));
  InaHeader header{.kind = InaKind::refusal, .operation = operation};
  header.checksum = checksum_of(header, std::span(out).subspan(sizeof(header)), {});
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

void Refusal::raise() const {
  switch (reason) {
    case RefusalReason::mismatch:
      throw Mismatch(text);
    case RefusalReason::invalid:
      if (accused.empty()) break;
      throw PeerInvalid(text, accused);
    case RefusalReason::lost:
      throw PeerLost(text, accused);
    case RefusalReason::late:
      throw Timeout(text, accused);
    case RefusalReason::not_admitted:
      throw NotAdmitted(text);
  }
  throw MalformedFrame(text);
}

InaHeader parse_ina_header(std::span<const std::byte> in) {
  field(in.size() >= sizeof(InaHeader), "length", in.size(), "at least the header's ",
        sizeof(InaHeader));
  auto const h = load<InaHeader>(in.data());
  field(h.magic == ina_magic, "magic", h.magic, ina_magic);
  field(h.version == ina_version, "version", h.version, int(ina_version),
        "; workers and aggregators need the same release");
  field(h.kind >= InaKind::contribution && h.kind <= InaKind::refusal, "kind", std::uint8_t(h.kind),
        "1 (contribution), 2 (update) or 3 (refusal)");
  return h;
}

InaPlan peek_plan(std::span<const std::byte> in) {
  InaHeader const h = parse_ina_header(in);
  field(h.kind == InaKind::contribution, "kind", std::uint8_t(h.kind), "1 (contribution)");
  field(h.round == 0, "round", h.round, "0: the operation is not known here");
  return parse_plan(in.subspan(sizeof(h)));
}

InaPlan parse_opening(std::span<const std::byte> in) {
  InaHeader const h = parse_ina_header(in);
  InaPlan const plan = peek_plan(in);
  BlockList const blocks = plan.first_blocks();
  check_body(h, in, sizeof(InaPlanRecord), plan, {h.operation, 0, &blocks});
  field(h.worker < plan.workers, "worker", h.worker, "less than the plan's workers ", plan.workers);
  return plan;
}

ContributionView parse_contribution(std::span<const std::byte> in, InaPlan const& plan, int worker,
                                    InaExpected const& expected, NumbersParser parse_numbers) {
  ContributionView view{.header = parse_ina_header(in), .plan = plan, .votes = {}, .blocks = {}};
  InaHeader const& h = view.header;
  field(h.kind == InaKind::contribution, "kind", std::uint8_t(h.kind), "1 (contribution)");
  field(h.worker == worker, "worker", h.worker, worker);
  field(h.operation == expected.operation, "operation", h.operation, expected.operation);
  field(h.round == expected.round, "round", h.round, expected.round);
  BlockList round = *expected.blocks;
  std::size_t const plan_bytes = h.round == 0 ? sizeof(InaPlanRecord) : 0;
  if (h.round == 0) {
    view.plan = parse_plan(in.subspan(sizeof(h)));
    round = view.plan.first_blocks();
  }
  Body const body =
      check_body(h, in, plan_bytes, view.plan, {expected.operation, expected.round, &round});
  view.votes = parse_numbers(body.numbers, view.plan, round);
  view.blocks = body.blocks;
  return view;
}

UpdateView parse_update(std::span<const std::byte> in, InaPlan const& plan,
                        InaExpected const& expected, NumbersParser parse_numbers) {
  UpdateView view{.header = parse_ina_header(in), .next = {}, .blocks = {}};
  InaHeader const& h = view.header;
  field(h.kind == InaKind::update, "kind", std::uint8_t(h.kind), "2 (update)");
  field(h.worker == 0, "worker", h.worker, "0 in an update");
  Body const body = check_body(h, in, 0, plan, expected);
  // A worker that votes for a block sends it in its round; nobody votes for the first round.
  std::uint64_t const all = expected.blocks->all_bits();
  field(h.round == 0 || h.bitmap == all, "bitmap", h.bitmap, all,
        ", as all blocks of a later round have been voted for");
  view.next = parse_numbers(body.numbers, plan, *expected.blocks);
  view.blocks = body.blocks;
  return view;
}

Refusal parse_refusal(std::span<const std::byte> in, std::uint32_t operation, int workers) {
  InaHeader const h = parse_ina_header(in);
  field(h.kind == InaKind::refusal, "kind", std::uint8_t(h.kind), "3 (refusal)");
  field(h.operation == operation, "operation", h.operation, operation);
  field(h.round == 0, "round", h.round, "0 in a refusal");
  field(h.worker == 0, "worker", h.worker, "0 in a refusal");
  field(h.numbers == 0, "numbers", h.numbers, "0 in a refusal");
  field(h.reserved == 0, "reserved", h.reserved, "0");
  field(h.bitmap == 0, "bitmap", h.bitmap, "0 in a refusal");
  auto const body = in.subspan(sizeof(h));
  field(body.size() >= sizeof(RefusalRecord), "length behind the header", body.size(), "at least ",
        sizeof(RefusalRecord), " in a refusal");
  auto const record = load<RefusalRecord>(body.data());
  field(record.reason >= std::uint32_t(RefusalReason::mismatch) &&
            record.reason <= std::uint32_t(RefusalReason::not_admitted),
        "reason", record.reason, "1 to 5");
  field(record.accused <= static_cast<std::uint32_t>(workers), "accused", record.accused,
        "at most the ", workers, " workers");
  bool const accuses = record.reason == std::uint32_t(RefusalReason::lost) ||
                       record.reason == std::uint32_t(RefusalReason::late);
  field(record.accused > 0 || !accuses, "accused", record.accused,
        "at least 1 where workers are lost or late");
  field(record.text_bytes <= most_refusal_text, "text_bytes", record.text_bytes, "at most ",
        most_refusal_text);
  field(record.reserved == 0, "refusal's reserved", record.reserved, "0");
  std::size_t const size = sizeof(record) + record.accused * number_bytes + record.text_bytes;
  field(body.size() == size, "length behind the header", body.size(), size, " for ", record.accused,
        " accused and a text of ", record.text_bytes, " bytes");
  check_checksum(h, body, {});
  Refusal refusal{.reason = RefusalReason(record.reason), .accused = {}, .text = {}};
  auto rest = body.subspan(sizeof(record));
  std::uint32_t least = 0;
  for (std::uint32_t i = 0; i < record.accused; ++i, rest = rest.subspan(number_bytes)) {
    auto const worker = load<std::uint32_t>(rest.data());
    field(worker >= least && worker < static_cast<std::uint32_t>(workers), "accused worker", worker,
          least, " to ", workers, " - 1");
    refusal.accused.push_back(static_cast<int>(worker));
    least = worker + 1;
  }
  refusal.text.assign(reinterpret_cast<char const*>(rest.data()), rest.size());
  return refusal;
}

}  // namespace sparsecomm
