#include "transport/ucx_messages.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/ucx_worker.h"
#include "wire/checksum.h"

namespace sparsecomm {
namespace {

constexpr unsigned message_id = 1;
constexpr std::size_t most_pieces = 3;

// For closing, where nobody says how long it may take.
constexpr Duration messages_farewell = std::chrono::seconds(1);

// Followed by the opening. Both sides run the same release of UCX, hence on the same byte order.
struct MessageHeader {
  std::uint64_t token = 0;
  std::uint32_t instance = 0;
  std::uint32_t reserved = 0;
  std::array<std::byte, opening_bytes> opening{};
};
constexpr std::size_t fixed_header_bytes = sizeof(MessageHeader) - opening_bytes;

struct Peer {
  MessageSink* sink = nullptr;  // null once the connection has gone
  ucp_ep_h endpoint = nullptr;
  std::uint64_t token = 0, peer_token = 0;
  std::string error;
  bool malformed = false;
  std::size_t sends = 0, receives = 0;  // under way
  std::size_t borrowed = 0;             // sends of bytes that nobody holds
  std::size_t copied = 0;               // bytes that wait in copies

  void fail(std::string const& why) {
    if (error.empty()) error = why;
  }
};

class MessageEngine;

struct Send {
  MessageEngine* engine = nullptr;
  Peer* peer = nullptr;
  MessageHeader header;
  std::array<ucp_dt_iov_t, most_pieces> parts{};
  std::shared_ptr<void const> memory;
  std::vector<std::byte> copy;
};

struct Receive {
  MessageEngine* engine = nullptr;
  Peer* peer = nullptr;
  std::uint32_t instance = 0;
  MessageSink::Place place;
};

// What UCX holds pointers to, given out again when it has let go.
template <class T>
class Pool {
 public:
  T& take() {
    if (free_.empty()) {
      free_.reserve(all_.size() + 1);
      return all_.emplace_back();
    }
    T& taken = *free_.back();
    free_.pop_back();
    return taken;
  }
  void give_back(T& item) { free_.push_back(&item); }

 private:
  std::deque<T> all_;
  std::vector<T*> free_;
};

std::uint64_t checksum_of(std::string_view text) {
  Checksum sum;
  sum.add(std::as_bytes(std::span(text)));
  return sum.value();
}

std::string introduce(UcxWorker const& worker) {
  std::string const text = concat(worker.ucx().release, '\n', worker.address());
  std::uint64_t const sum = checksum_of(text);
  std::string introduction(sizeof(sum), '\0');
  std::memcpy(introduction.data(), &sum, sizeof(sum));
  introduction += text;
  require<Error>(introduction.size() <= UcxMessages::most_introduction, "UCX's address has ",
                 introduction.size(), " bytes, must be at most ", UcxMessages::most_introduction,
                 "; name fewer devices in UCX_NET_DEVICES");
  return introduction;
}

class MessageEngine final : public UcxMessages {
 public:
  MessageEngine(UcxOptions const& options, std::size_t connections)
      : worker_(options, UCP_FEATURE_AM, connections), introduction_(introduce(worker_)) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                         UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = message_id;
    handler.cb = arrived;
    handler.arg = this;
    ucs_status_t const status = ucx().ucp_worker_set_am_recv_handler(worker_.get(), &handler);
    require<Error>(status == UCS_OK,
                   "ucp_worker_set_am_recv_handler failed: ", ucx().ucs_status_string(status));
  }
  ~MessageEngine() override {
    if (own()) worker_.close({}, messages_farewell);
  }

  std::string const& introduction() const override { return introduction_; }
  std::unique_ptr<UcxConnection> connect(std::string const& introduction, std::uint64_t token,
                                         std::uint64_t peer_token, MessageSink& sink) override;

  bool progress() override { return worker_.progress(); }
  bool rest() override { return ucx().ucp_worker_arm(worker_.get()) == UCS_OK; }
  int file() const override { return worker_.event_file(); }

  bool own() const { return process_ == ::getpid(); }
  void close(Peer& peer);
  void send(Peer& peer, std::uint32_t instance, std::span<const std::span<const std::byte>> pieces,
            Send& send);
  Send& take_send() { return sends_.take(); }

 private:
  UcxLibrary const& ucx() const { return worker_.ucx(); }

  static ucs_status_t arrived(void* engine, void const* header, std::size_t header_bytes,
                              void* data, std::size_t bytes, ucp_am_recv_param_t const* param);
  static void sent(void* request, ucs_status_t status, void* send);
  static void fetched(void* request, ucs_status_t status, std::size_t bytes, void* receive);
  static void failed(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  void place(Peer& peer, MessageHeader const& header, std::size_t opening, void* data,
             std::size_t bytes, bool announced);
  void fetch(Peer& peer, std::uint32_t instance, MessageSink::Place place, std::size_t opening,
             void* data);
  void complete(Send& send, ucs_status_t status);
  void complete(Receive& receive, ucs_status_t status);

  pid_t const process_ = ::getpid();
  std::deque<Peer> peers_;
  std::unordered_map<std::uint64_t, Peer*> by_token_;
  Pool<Send> sends_;
  Pool<Receive> receives_;
  UcxWorker worker_;  // goes first
  std::string const introduction_;
};

class MessageConnection final : public UcxConnection {
 public:
  MessageConnection(MessageEngine& engine, Peer& peer) : engine_(engine), peer_(peer) {}
  ~MessageConnection() override {
    if (engine_.own()) engine_.close(peer_);
  }

  std::string const& error() const override { return peer_.error; }
  bool malformed() const override { return peer_.malformed; }
  bool flushed() const override { return peer_.sends == 0; }

  void send(std::uint32_t instance, std::span<const std::span<const std::byte>> pieces,
            std::shared_ptr<void const> memory) override {
    if (!peer_.error.empty()) return;
    Send& send = engine_.take_send();
    send.memory = std::move(memory);
    engine_.send(peer_, instance, pieces, send);
  }
  void send_copy(std::uint32_t instance, std::span<const std::byte> message) override {
    if (!peer_.error.empty()) return;
    if (peer_.copied + message.size() > most_copied) {
      return peer_.fail(
          concat("more than ", most_copied, " bytes wait: the other side does not read"));
    }
    Send& send = engine_.take_send();
    send.copy.assign(message.begin(), message.end());
    std::span<const std::byte> const piece = send.copy;
    engine_.send(peer_, instance, std::span(&piece, 1), send);
  }

 private:
  MessageEngine& engine_;
  Peer& peer_;
};

std::unique_ptr<UcxConnection> MessageEngine::connect(std::string const& introduction,
                                                      std::uint64_t token, std::uint64_t peer_token,
                                                      MessageSink& sink) {
  std::uint64_t sum = 0;
  std::string_view text = introduction;
  require<MalformedFrame>(text.size() > sizeof(sum) && text.size() <= most_introduction,
                          "UCX introduction: length is ", text.size(), ", must be ",
                          sizeof(sum) + 1, " to ", most_introduction);
  std::memcpy(&sum, text.data(), sizeof(sum));
  text.remove_prefix(sizeof(sum));
  require<MalformedFrame>(sum == checksum_of(text), "UCX introduction: checksum is ", sum,
                          ", must be ", checksum_of(text));
  std::string_view const release = text.substr(0, text.find('\n'));
  require<Error>(release == ucx().release, "the other side's UCX is ", release, ", here it is ",
                 ucx().release);
  text.remove_prefix(std::min(text.size(), release.size() + 1));
  auto const unused = std::ranges::find_if(peers_, [](Peer const& peer) {
    return peer.sink == nullptr && peer.sends == 0 && peer.receives == 0;
  });
  Peer& peer = unused == peers_.end() ? peers_.emplace_back() : *unused;
  peer = {};
  UcxQuiet const quiet(ucx(), "FATAL");  // that there is no way is said below
  ucs_status_t const status = worker_.connect(std::string(text), failed, &peer, peer.endpoint);
  require<Error>(status == UCS_OK, "no way over UCX: ", ucx().ucs_status_string(status));
  peer.token = token;
  peer.peer_token = peer_token;
  peer.sink = &sink;
  by_token_[token] = &peer;
  return std::make_unique<MessageConnection>(*this, peer);
}

void MessageEngine::close(Peer& peer) {
  by_token_.erase(peer.token);
  peer.sink = nullptr;
  peer.fail("it was closed");
  ucp_request_param_t param;
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* const request = ucx().ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param);
  if (UCS_PTR_IS_PTR(request)) ucx().ucp_request_free(request);  // goes on by itself
  Deadline const deadline(steady_clock(), messages_farewell);
  while (peer.borrowed > 0 && !deadline.passed()) progress();
}

void MessageEngine::send(Peer& peer, std::uint32_t instance,
                         std::span<const std::span<const std::byte>> pieces, Send& send) {
  require(pieces.size() <= most_pieces, "a message of ", pieces.size(), " pieces, must be at most ",
          most_pieces);
  send.engine = this;
  send.peer = &peer;
  send.header.token = peer.peer_token;
  send.header.instance = instance;
  std::size_t opening = 0, count = 0;
  for (auto const piece : pieces) {
    if (piece.empty()) continue;
    std::size_t const first = std::min(piece.size(), opening_bytes - opening);
    std::memcpy(send.header.opening.data() + opening, piece.data(), first);
    opening += first;
    if (first == piece.size()) continue;
    send.parts[count++] = {const_cast<std::byte*>(piece.data() + first), piece.size() - first};
  }
  ucp_request_param_t param;
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = sent;
  param.user_data = &send;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  bool const together = count <= 1;
  param.datatype = together ? ucp_dt_make_contig(1) : ucp_dt_make_iov();
  ++peer.sends;
  peer.copied += send.copy.size();
  if (!send.memory && send.copy.empty()) ++peer.borrowed;
  void* const request =
      ucx().ucp_am_send_nbx(peer.endpoint, message_id, &send.header, fixed_header_bytes + opening,
                            together ? send.parts[0].buffer : send.parts.data(),
                            together ? (count == 0 ? 0 : send.parts[0].length) : count, &param);
  if (!UCS_PTR_IS_PTR(request)) complete(send, UCS_PTR_RAW_STATUS(request));
}

void MessageEngine::sent(void* request, ucs_status_t status, void* user) {
  auto& send = *static_cast<Send*>(user);
  send.engine->ucx().ucp_request_free(request);
  send.engine->complete(send, status);
}

void MessageEngine::complete(Send& send, ucs_status_t status) {
  Peer& peer = *send.peer;
  if (status != UCS_OK) peer.fail(ucx().ucs_status_string(status));
  --peer.sends;
  peer.copied -= send.copy.size();
  if (!send.memory && send.copy.empty()) --peer.borrowed;
  send.memory.reset();
  send.copy.clear();
  sends_.give_back(send);
}

// Called by C code, so nothing may leave it.
ucs_status_t MessageEngine::arrived(void* user, void const* bytes, std::size_t header_bytes,
                                    void* data, std::size_t length,
                                    ucp_am_recv_param_t const* param) {
  auto& engine = *static_cast<MessageEngine*>(user);
  MessageHeader header;
  if (header_bytes < fixed_header_bytes || header_bytes > sizeof(header)) return UCS_OK;
  std::memcpy(static_cast<void*>(&header), bytes, header_bytes);
  auto const found = engine.by_token_.find(header.token);
  if (found == engine.by_token_.end()) return UCS_OK;
  Peer& peer = *found->second;
  if (!peer.error.empty()) return UCS_OK;
  try {
    std::size_t const opening = header_bytes - fixed_header_bytes;
    require<MalformedFrame>(opening == opening_bytes || length == 0,
                            "aggregation message: opening is ", opening, ", must be ",
                            opening_bytes);
    engine.place(peer, header, opening, data, length,
                 (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
  } catch (MalformedFrame const& error) {
    peer.malformed = peer.error.empty();
    peer.fail(error.what());
  } catch (std::exception const& error) {
    peer.fail(error.what());
  }
  return UCS_OK;  // what is not fetched yet UCX keeps for that
}

void MessageEngine::place(Peer& peer, MessageHeader const& header, std::size_t opening, void* data,
                          std::size_t length, bool announced) {
  auto const begin = std::span(header.opening).first(opening);
  require<MalformedFrame>(length <= SIZE_MAX / 2, "aggregation message: length is ", length);
  auto place = peer.sink->place(header.instance, opening + length, begin);
  if (place.bytes.empty()) return;
  require(place.bytes.size() == opening + length, "a place of ", place.bytes.size(),
          " bytes for a message of ", opening + length);
  std::ranges::copy(begin, place.bytes.begin());
  if (announced) return fetch(peer, header.instance, std::move(place), opening, data);
  if (length > 0) std::memcpy(place.bytes.data() + opening, data, length);
  peer.sink->take(header.instance, place.bytes);
}

void MessageEngine::fetch(Peer& peer, std::uint32_t instance, MessageSink::Place place,
                          std::size_t opening, void* data) {
  Receive& receive = receives_.take();
  receive.engine = this;
  receive.peer = &peer;
  receive.instance = instance;
  receive.place = std::move(place);
  ++peer.receives;
  auto const rest = receive.place.bytes.subspan(opening);
  ucp_request_param_t param;
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = fetched;
  param.user_data = &receive;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  void* const request =
      ucx().ucp_am_recv_data_nbx(worker_.get(), data, rest.data(), rest.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) complete(receive, UCS_PTR_RAW_STATUS(request));
}

void MessageEngine::fetched(void* request, ucs_status_t status, std::size_t /*bytes*/, void* user) {
  auto& receive = *static_cast<Receive*>(user);
  receive.engine->ucx().ucp_request_free(request);
  receive.engine->complete(receive, status);
}

void MessageEngine::complete(Receive& receive, ucs_status_t status) {
  Peer& peer = *receive.peer;
  --peer.receives;
  if (status != UCS_OK) peer.fail(ucx().ucs_status_string(status));
  auto const place = std::exchange(receive.place, {});
  std::uint32_t const instance = receive.instance;
  receives_.give_back(receive);
  if (peer.sink == nullptr || !peer.error.empty()) return;
  try {
    peer.sink->take(instance, place.bytes);
  } catch (std::exception const& error) {
    peer.fail(error.what());
  }
}

void MessageEngine::failed(void* user, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  static_cast<Peer*>(user)->fail(status == UCS_ERR_CONNECTION_RESET
                                     ? "it closed the connection"
                                     : "UCX reports that the connection broke");
}

}  // namespace

std::unique_ptr<UcxMessages> make_ucx_messages(UcxOptions const& options, std::size_t connections) {
  return std::make_unique<MessageEngine>(options, connections);
}

}  // namespace sparsecomm
