// An HTTP server for a few small answers, by libevent, with a thread of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/process.h"

namespace sparsecomm {

struct HttpRequest {
  std::string method, path;
  std::vector<std::pair<std::string, std::string>> query;  // without escapes
  bool control = false;                                    // came to a socket of that kind
};

struct HttpReply {
  int status = 200;
  std::string body;
  std::string type = "text/plain; charset=utf-8";
};

// Called by the server's thread, one request at a time. Must not throw.
using HttpHandler = std::function<HttpReply(HttpRequest const& request)>;

struct HttpListener {
  FileDescriptor socket;  // that listens
  bool control = false;
};

// A connection is for one request, and closed after `limit` whatever comes over it; of each
// listener `most_connections` are served at once, and others wait.
class HttpServer {
 public:
  static constexpr std::size_t most_connections = 64;

  HttpServer(std::vector<HttpListener> listeners, HttpHandler handler,
             std::chrono::seconds limit = std::chrono::seconds(10));
  HttpServer(HttpServer const&) = delete;
  HttpServer& operator=(HttpServer const&) = delete;
  ~HttpServer();

 private:
  struct Loop;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace sparsecomm
