#include "connect.h"

#include <array>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bounded_store.h"
#include "c10d_transport.h"
#include "store_rendezvous.h"

namespace sparsecomm {
namespace {

std::unique_ptr<Transport> connect_ucx(ConnectPlace const& place, ConnectOptions const& options,
                                       StoreMeeting const& meeting) {
  UcxOptions ucx = options.libraries.ucx;
  if (ucx.connect_timeout) ucx.connect_timeout = std::min(*ucx.connect_timeout, options.timeout);
  return make_ucx_transport(place.rank, place.size, meeting.rendezvous, ucx);
}

// Remembers what is set through it and its clones, which use the same connection.
class NotingStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  c10::intrusive_ptr<c10d::Store> clone() override {
    auto same = c10::make_intrusive<NotingStore>(prefix_, store_);
    same->keys_ = keys_;
    return same;
  }
  void set(std::string const& key, std::vector<std::uint8_t> const& value) override {
    PrefixStore::set(key, value);
    keys_->push_back(key);
  }
  void multiSet(std::vector<std::string> const& keys,
                std::vector<std::vector<std::uint8_t>> const& values) override {
    PrefixStore::multiSet(keys, values);
    keys_->insert(keys_->end(), keys.begin(), keys.end());
  }
  void delete_all() noexcept {
    try {
      for (std::string const& key : *keys_) deleteKey(key);
    } catch (std::exception const&) {
      // Not every store can.
    }
  }

 private:
  std::shared_ptr<std::vector<std::string>> keys_ = std::make_shared<std::vector<std::string>>();
};

std::unique_ptr<Transport> connect_c10d(ConnectPlace const& place,
                                        ConnectOptions const& /*options*/,
                                        StoreMeeting const& meeting) {
  auto const store = c10::make_intrusive<NotingStore>("gloo", meeting.store);
  auto const before = listening_event_sets();
  auto group = place.make_gloo(store);
  // Those of gloo, one for each interface, have gained a connection to every peer.
  std::vector<ForkGuard> guards;
  auto const peers = static_cast<std::size_t>(place.size - 1);
  for (auto const& [event_set, sockets] : listening_event_sets()) {
    auto const known = before.find(event_set);
    std::size_t const had = known == before.end() ? 0 : known->second;
    if (peers > 0 && sockets >= had + peers) guards.emplace_back(event_set).close_on_exec();
  }
  agree_on_success(*meeting.rendezvous, "");  // all ranks have read what stands in the store
  store->delete_all();
  return make_c10d_transport(std::move(group),
                             c10::make_intrusive<c10d::PrefixStore>("failures", meeting.store),
                             meeting.rendezvous->run(), std::move(guards));
}

// How those of transports() that connect processes do so.
struct Connector {
  std::string_view name;
  std::unique_ptr<Transport> (*connect)(ConnectPlace const& place, ConnectOptions const& options,
                                        StoreMeeting const& meeting);
};
constexpr std::array connectors{Connector{"ucx", connect_ucx}, Connector{"c10d", connect_c10d}};

Connector const& connector_of(TransportEntry const& entry) {
  auto const* const found = std::ranges::find(connectors, entry.name, &Connector::name);
  require<Error>(found != connectors.end(), "transport '", entry.name,
                 "' is to connect processes, and no one has said how; add it to `connectors`");
  return *found;
}

std::vector<TransportEntry const*> candidates(std::string const& name) {
  if (name != "auto") {
    TransportEntry const& entry = find_transport(name);
    require(entry.connects_processes, "transport '", name,
            "' does not connect the ranks of a process group but ", entry.description);
    return {&entry};
  }
  std::vector<TransportEntry const*> entries;
  for (TransportEntry const& entry : transports()) {
    if (entry.automatic) entries.push_back(&entry);
  }
  return entries;
}

// Throws again what `check` threw once: whoever cleans up may have swallowed it.
std::function<void()> rethrowing(std::function<void()> check) {
  return [check = std::move(check), thrown = std::make_shared<std::exception_ptr>()] {
    if (*thrown) std::rethrow_exception(*thrown);
    try {
      check();
    } catch (...) {
      *thrown = std::current_exception();
      throw;
    }
  };
}

}  // namespace

std::unique_ptr<Transport> connect(ConnectPlace const& place, ConnectOptions const& options,
                                   std::function<void()> const& check) {
  auto const entries = candidates(options.transport);
  auto const checked = rethrowing(check);
  auto const store = c10::make_intrusive<c10d::PrefixStore>(
      "sparsecomm", make_bounded_store(place.store, options.timeout, checked));
  std::string const purpose =
      concat("transport=", options.transport, options.agreed.empty() ? "" : ", ", options.agreed);
  StoreMeeting const meeting =
      meet_in_store(place.rank, place.size, store, purpose,
                    {options.timeout, checked, options.stall, options.call});
  for (TransportEntry const* const entry : entries) {
    Connector const& connector = connector_of(*entry);
    try {
      auto transport = connector.connect(place, options, meeting);
      checked();
      return transport;
    } catch (TransportUnavailable const& reason) {
      std::string const text = concat("transport ", entry->name, " cannot be used: ", reason.what(),
                                      "; sparsecomm doctor tries all of them");
      if (entry == entries.back()) throw TransportUnavailable(text);
      if (place.rank == 0) place.warn(text);
    }
  }
  throw Error("no transport is automatic");
}

}  // namespace sparsecomm
