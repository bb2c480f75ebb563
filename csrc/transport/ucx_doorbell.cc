#include "transport/ucx_doorbell.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace sparsecomm {

UcxDoorbell::UcxDoorbell(int rank, int size, std::uint32_t run)
    : rank_(rank), run_(run), bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), ears_(size) {
  require<Error>(bell_.open(), "no file descriptor could be opened for a transport");
}

void UcxDoorbell::ring(UcxLink& link, int peer, std::uint32_t number) {
  auto const free = [&](Sent const& sent) {
    return sent.request == nullptr ||
           link.ucx().ucp_request_check_status(sent.request) != UCS_INPROGRESS;
  };
  auto place = std::ranges::find_if(sent_, free);
  if (place == sent_.end()) place = sent_.emplace(sent_.end());
  if (place->request != nullptr) link.ucx().ucp_request_free(place->request);
  place->message = make_ring(run_, number);
  auto const ignore = [](void*, ucs_status_t, void*) {};
  void* const request = link.send(peer, UcxLink::tag_of(rank_, ring_tag),
                                  std::as_bytes(std::span(&place->message, 1)), ignore, nullptr);
  place->request = UCS_PTR_IS_PTR(request) ? request : nullptr;
}

void UcxDoorbell::listen_again(UcxLink& link) {
  deaf_ = false;
  auto const came = [](void* /*request*/, ucs_status_t status, ucp_tag_recv_info_t const* message,
                       void* user) {
    static_cast<Ear*>(user)->hear(status, status == UCS_OK ? message->length : 0);
  };
  for (int peer = 0; peer < static_cast<int>(ears_.size()); ++peer) {
    Ear& ear = ears_[peer];
    if (peer == rank_ || std::exchange(ear.listens, true)) continue;
    ear = {.owner = this, .peer = peer, .ucx = &link.ucx(), .listens = true};
    void* const request =
        link.receive(UcxLink::tag_of(peer, ring_tag),
                     std::as_writable_bytes(std::span(&ear.message, 1)), came, &ear);
    if (UCS_PTR_IS_ERR(request)) {
      error_ = std::make_exception_ptr(Error(concat(
          "no ring can be received: ", link.ucx().ucs_status_string(UCS_PTR_STATUS(request)))));
    } else if (ear.listens) {
      ear.request = request;
    } else {
      link.ucx().ucp_request_free(request);
    }
  }
}

// Called by the engine.
void UcxDoorbell::Ear::hear(ucs_status_t status, std::size_t bytes) {
  // Where it is not known yet, listen() releases it.
  if (request != nullptr) ucx->ucp_request_free(std::exchange(request, nullptr));
  if (status == UCS_ERR_CANCELED) return;
  listens = false;
  owner->deaf_ = true;
  try {
    require<Error>(status == UCS_OK || status == UCS_ERR_MESSAGE_TRUNCATED,
                   "a ring could not be received: ", ucx->ucs_status_string(status));
    if (bytes != sizeof message) message = {.run = owner->run_};  // whose checksum is another one
    if (auto const number = number_of(message, owner->run_, peer)) owner->rings_.add(*number);
  } catch (...) {
    owner->error_ = std::current_exception();
  }
}

std::optional<Woken> UcxDoorbell::look(std::uint32_t heard) {
  if (error_) std::rethrow_exception(error_);
  bool const woken = woken_.exchange(false);
  if (rings_.above(heard)) return Woken::rung;
  return woken ? std::optional(Woken::woken) : std::nullopt;
}

void UcxDoorbell::drain() noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] auto const read = ::read(bell_.get(), &count, sizeof count);
}

void UcxDoorbell::wake() noexcept {
  woken_ = true;
  if (!idle_) return;
  std::uint64_t const one = 1;
  [[maybe_unused]] auto const written = ::write(bell_.get(), &one, sizeof one);
}

void UcxDoorbell::leave(UcxLink& link) noexcept {
  open_ = false;
  for (Ear& ear : ears_) {
    if (ear.request != nullptr) link.cancel(ear.request);
  }
  for (Sent& sent : sent_) {
    // What is under way goes on by itself.
    if (sent.request != nullptr) link.ucx().ucp_request_free(std::exchange(sent.request, nullptr));
  }
}

}  // namespace sparsecomm
