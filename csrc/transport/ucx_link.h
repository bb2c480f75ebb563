// The ranks of a transport as peers of one UCX worker, with an endpoint for each, closed with their
// owner. Only files named ucx* include this.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/process.h"
#include "transport/ucx_worker.h"

namespace sparsecomm {

// Tags of the transport's own; a user's are below 2^31.
inline constexpr std::uint32_t hello_tag = 0xffffffffu, goodbye_tag = 0xfffffffeu,
                               directory_tag = 0xfffffffdu, ring_tag = 0xfffffffcu;

class UcxLink {
 public:
  // UCX matches the whole of it: who sent the message, and which one it is.
  static ucp_tag_t tag_of(int sender, std::uint32_t tag) {
    return (static_cast<ucp_tag_t>(static_cast<std::uint32_t>(sender)) << 32) | tag;
  }

  struct Peer {
    std::string address;          // of its worker, once introduced
    ucp_ep_h endpoint = nullptr;  // once reached
    bool failed = false;
    bool said_goodbye = false;
    std::string reason;                      // why, once failed
    std::optional<ProcessIdentity> process;  // of a peer on this host
    FileDescriptor ended;                    // readable once that process has ended, where watched
  };

  // The ranks that stand 2^i before and behind `rank`, in order: with whom it exchanges messages in
  // patterns of log P rounds.
  static std::vector<int> partners_of(int rank, int size);

  // Opens the library and a worker, then exchanges addresses with the partners and makes their
  // endpoints, which connect with the first message. Collective; throws TransportUnavailable, the
  // same on every rank.
  static UcxLink open(int rank, int size, Rendezvous& rendezvous, UcxOptions const& options);

  UcxLink(UcxLink&& other) = default;
  UcxLink& operator=(UcxLink&&) = delete;
  ~UcxLink();

  UcxLibrary const& ucx() const { return worker_.ucx(); }
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  // What a rank says of itself: for introduce() elsewhere, which throws where it is not that.
  std::string const& introduction() const { return introduction_; }
  void introduce(int rank, std::string const& text);
  // Makes the endpoint of a peer that has been introduced. False where there is no way to it; then
  // it is marked as failed.
  bool reach(int rank);
  // How many of the ranks that were introduced run on this host, this one included.
  int local_ranks() const;

  // Complete at once: null. Else the engine's request, or an error that UCS_PTR_IS_ERR tells; then
  // the peer is marked as failed. `done` is called, within progress(), for what does not complete
  // at once.
  void* send(int peer, ucp_tag_t tag, std::span<const std::byte> bytes,
             ucp_send_nbx_callback_t done, void* user);
  // As send(), but never null: what is complete at once calls `done` before this returns.
  void* receive(ucp_tag_t tag, std::span<std::byte> bytes, ucp_tag_recv_nbx_callback_t done,
                void* user);
  // Whether anything happened.
  bool progress() { return worker_.progress(); }
  // Has programs that this process executes close the connections that stand now.
  void close_on_exec() const noexcept { worker_.close_on_exec(); }
  // Sleeps until something may have happened to the worker, to `peer`'s process or to `wake`, but
  // no longer than `limit` (rounded up to milliseconds).
  void sleep(Peer& peer, int wake, Duration limit);
  // The same, of two such files and nobody's process.
  void sleep(int wake, int bell, Duration limit) { worker_.sleep({wake, bell}, limit); }
  // Marks a peer on this host as failed if its process has ended.
  static void notice_end(Peer& peer);

  void cancel(void* request) { worker_.cancel(request); }
  // Pushes out what was sent, for as long as `limit`. False: something is left.
  bool flush(Duration limit) noexcept { return worker_.flush(limit); }
  // Closes the endpoints, as UcxWorker::close(); sends fail from now on.
  void close(Duration limit) noexcept;

 private:
  UcxLink(int rank, int size, UcxOptions const& options);

  UcxWorker worker_;
  ProcessIdentity own_;
  std::string introduction_;
  std::vector<Peer> peers_;
};

}  // namespace sparsecomm
