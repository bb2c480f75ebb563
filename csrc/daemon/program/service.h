// What an aggregator answers to those who watch and operate it:
//
//   GET /metrics           metrics_text()
//   GET /healthz           200 if the thread that serves answers, 503 else
//   GET /readyz            200 if workers of another job can connect, 503 else
//   GET /jobs              the jobs, in JSON
//   DELETE /jobs/ID        ends a job
//   POST /drain?limit=S    takes no more jobs, and ends when those have ended, or after S seconds
//
// The last three are for control sockets.
#pragma once

#include <functional>

#include "daemon/program/http_server.h"
#include "daemon/server.h"

namespace sparsecomm {

class Service {
 public:
  // Both outlive it. `tokens` is called by the thread that serves. `drain`: the limit of a drain
  // that has none.
  Service(AggregatorServer& server, std::function<std::size_t()> tokens, Duration drain)
      : server_(server), tokens_(std::move(tokens)), drain_(drain) {}

  HttpReply answer(HttpRequest const& request) const noexcept;

 private:
  struct Route;

  HttpReply metrics(HttpRequest const& request) const;
  HttpReply health(HttpRequest const& request) const;
  HttpReply readiness(HttpRequest const& request) const;
  HttpReply jobs(HttpRequest const& request) const;
  HttpReply end_job(HttpRequest const& request) const;
  HttpReply drain(HttpRequest const& request) const;

  // Has the thread that serves call it. Throws Unanswered if it does not within a second.
  template <class Task>
  auto ask(Task task) const;

  AggregatorServer& server_;
  std::function<std::size_t()> const tokens_;
  Duration const drain_;
};

}  // namespace sparsecomm
