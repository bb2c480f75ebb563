#include "daemon/program/http_server.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <event2/listener.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "ina/socket.h"

namespace sparsecomm {
namespace {

constexpr std::size_t most_headers = 8192, most_body = 1024;  // bytes of a request
constexpr timeval sweep_period{.tv_sec = 1, .tv_usec = 0};
constexpr timeval farewell{.tv_sec = 0, .tv_usec = 200'000};

template <auto Release>
struct Releasing {
  void operator()(auto* object) const { Release(object); }
};
template <class T, auto Release>
using Owned = std::unique_ptr<T, Releasing<Release>>;

struct Method {
  evhttp_cmd_type type;
  char const* name;
};
constexpr Method methods[] = {
    {EVHTTP_REQ_GET, "GET"}, {EVHTTP_REQ_POST, "POST"}, {EVHTTP_REQ_DELETE, "DELETE"}};

// The reference that keeps a connection's descriptor from being used for another.
struct Connection {
  explicit Connection(bufferevent* its_events)
      : events((bufferevent_incref(its_events), its_events)), since(steady_clock().now()) {}

  // The server has let it go, or its time is over.
  bool ended(TimePoint now, Duration limit) const {
    bufferevent_event_cb on_event = nullptr;
    bufferevent_getcb(events.get(), nullptr, nullptr, &on_event, nullptr);
    return on_event == nullptr || now - since > limit;
  }

  Owned<bufferevent, bufferevent_decref> events;
  TimePoint since;
};

}  // namespace

struct HttpServer::Loop {
  struct Door {
    Door(Loop& its_loop, HttpListener listener)
        : loop(its_loop), control(listener.control), http(evhttp_new(loop.base.get())) {
      require<Error>(http != nullptr, "evhttp_new: no memory");
      evhttp_set_max_headers_size(http.get(), most_headers);
      evhttp_set_max_body_size(http.get(), most_body);
      evhttp_set_timeout(http.get(), static_cast<int>(loop.limit.count()));
      ev_uint16_t allowed = 0;
      for (Method const& method : methods) allowed |= method.type;
      evhttp_set_allowed_methods(http.get(), allowed);
      evhttp_set_bevcb(http.get(), accept, this);
      evhttp_set_gencb(http.get(), answer, this);
      bound = evhttp_accept_socket_with_handle(http.get(), listener.socket.get());
      require<Error>(bound != nullptr, "evhttp_accept_socket: ", system_text());
      listener.socket.release();
      evconnlistener_set_error_cb(evhttp_bound_socket_get_listener(bound), pause);
    }

    void sweep(TimePoint now) {
      std::erase_if(connections, [&](Connection const& connection) {
        if (!connection.ended(now, loop.limit)) return false;
        ::shutdown(bufferevent_getfd(connection.events.get()), SHUT_RDWR);
        return true;
      });
      if (connections.size() < most_connections) {
        evconnlistener_enable(evhttp_bound_socket_get_listener(bound));
      }
    }

    static bufferevent* accept(event_base* base, void* self) {
      auto& door = *static_cast<Door*>(self);
      bufferevent* const events = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
      if (events == nullptr) return nullptr;
      door.connections.emplace_back(events);
      if (door.connections.size() >= most_connections) {
        evconnlistener_disable(evhttp_bound_socket_get_listener(door.bound));
      }
      return events;
    }
    // The system has no room for more connections; a sweep goes on.
    static void pause(evconnlistener* listener, void* /*self*/) {
      evconnlistener_disable(listener);
    }
    static void answer(evhttp_request* request, void* self) {
      auto const& door = *static_cast<Door*>(self);
      door.loop.answer(request, door.control);
    }

    Loop& loop;
    bool control;
    std::vector<Connection> connections;  // outlived by what frees them
    Owned<evhttp, evhttp_free> http;
    evhttp_bound_socket* bound = nullptr;
  };

  Loop(std::vector<HttpListener> listeners, HttpHandler its_handler, std::chrono::seconds its_limit)
      : handler(std::move(its_handler)),
        limit(its_limit),
        base(event_base_new()),
        stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    require<Error>(base && stop.open(), "libevent or eventfd: ", system_text());
    for (HttpListener& listener : listeners) {
      doors.push_back(std::make_unique<Door>(*this, std::move(listener)));
    }
    stopping.reset(event_new(base.get(), stop.get(), EV_READ, on_stop, this));
    sweeping.reset(event_new(base.get(), -1, EV_PERSIST, on_sweep, this));
    require<Error>(stopping && sweeping && event_add(stopping.get(), nullptr) == 0 &&
                       event_add(sweeping.get(), &sweep_period) == 0,
                   "event_add: ", system_text());
  }

  void run() noexcept { event_base_dispatch(base.get()); }

  // What has been answered is sent: a drain may end the program at once.
  static void on_stop(evutil_socket_t /*file*/, short /*what*/, void* self) {
    auto const& loop = *static_cast<Loop*>(self);
    bool idle = true;
    for (auto const& door : loop.doors) idle = idle && door->connections.empty();
    event_base_loopexit(loop.base.get(), idle ? nullptr : &farewell);
  }
  static void on_sweep(evutil_socket_t /*file*/, short /*what*/, void* self) {
    for (auto const& door : static_cast<Loop*>(self)->doors) door->sweep(steady_clock().now());
  }

  void answer(evhttp_request* request, bool control) const {
    HttpRequest asked;
    asked.control = control;
    for (Method const& method : methods) {
      if (method.type == evhttp_request_get_command(request)) asked.method = method.name;
    }
    evhttp_uri const* const uri = evhttp_request_get_evhttp_uri(request);
    char const* const path = evhttp_uri_get_path(uri);
    char const* const query = evhttp_uri_get_query(uri);
    if (path != nullptr) asked.path = path;
    evkeyvalq pairs{};
    if (query != nullptr && evhttp_parse_query_str(query, &pairs) == 0) {
      for (evkeyval const* pair = pairs.tqh_first; pair != nullptr; pair = pair->next.tqe_next) {
        asked.query.emplace_back(pair->key, pair->value);
      }
      evhttp_clear_headers(&pairs);
    }
    HttpReply const reply = handler(asked);
    evkeyvalq* const headers = evhttp_request_get_output_headers(request);
    evhttp_add_header(headers, "Content-Type", reply.type.c_str());
    evhttp_add_header(headers, "Connection", "close");
    evbuffer* const body = evhttp_request_get_output_buffer(request);
    evbuffer_add(body, reply.body.data(), reply.body.size());
    evhttp_send_reply(request, reply.status, nullptr, nullptr);
  }

  HttpHandler const handler;
  std::chrono::seconds const limit;  // of a connection
  Owned<event_base, event_base_free> base;
  FileDescriptor stop;
  std::vector<std::unique_ptr<Door>> doors;
  Owned<event, event_free> stopping, sweeping;
};

HttpServer::HttpServer(std::vector<HttpListener> listeners, HttpHandler handler,
                       std::chrono::seconds limit)
    : loop_(std::make_unique<Loop>(std::move(listeners), std::move(handler), limit)),
      thread_([this] { loop_->run(); }) {}

HttpServer::~HttpServer() {
  ::eventfd_write(loop_->stop.get(), 1);
  thread_.join();
}

}  // namespace sparsecomm
