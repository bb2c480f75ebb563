#include "daemon/program/service.h"

#include <chrono>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "daemon/command_line.h"
#include "daemon/program/metrics.h"

namespace sparsecomm {
namespace {

class Unanswered : public Error {
 public:
  using Error::Error;
};

constexpr std::string_view jobs_folder = "/jobs/";

double seconds_of(Duration time) { return std::chrono::duration<double>(time).count(); }

HttpReply json(nlohmann::ordered_json const& value) {
  return {.body = value.dump() + "\n", .type = "application/json"};
}

nlohmann::ordered_json json_of(InaJobReport const& job, TimePoint now) {
  std::uint64_t refused = 0, rounds = 0;
  for (std::uint64_t const count : job.counts.refusals) refused += count;
  for (std::uint64_t const count : job.counts.rounds) rounds += count;
  return {{"id", name(job.id)},
          {"owner", job.owner},
          {"workers", job.workers},
          {"connected", job.connected},
          {"seconds", seconds_of(now - job.begun)},
          {"idle_seconds", seconds_of(now - job.active)},
          {"memory_bytes", job.memory},
          {"operations", job.counts.operations},
          {"refused", refused},
          {"rounds", rounds},
          {"received_bytes", job.counts.received_bytes},
          {"sent_bytes", job.counts.sent_bytes}};
}

}  // namespace

struct Service::Route {
  std::string_view method, path;
  bool is_folder, for_control;
  HttpReply (Service::*answer)(HttpRequest const& request) const;

  bool leads_to(std::string_view asked) const {
    return is_folder ? asked.starts_with(path) : asked == path;
  }
};

template <class Task>
auto Service::ask(Task task) const {
  auto answered = server_.ask(std::move(task));
  require<Unanswered>(answered.wait_for(std::chrono::seconds(1)) == std::future_status::ready,
                      "the thread that serves has not answered within 1 s");
  return answered.get();
}

HttpReply Service::answer(HttpRequest const& request) const noexcept {
  static constexpr Route routes[] = {
      {"GET", "/metrics", false, false, &Service::metrics},
      {"GET", "/healthz", false, false, &Service::health},
      {"GET", "/readyz", false, false, &Service::readiness},
      {"GET", "/jobs", false, true, &Service::jobs},
      {"DELETE", jobs_folder, true, true, &Service::end_job},
      {"POST", "/drain", false, true, &Service::drain},
  };
  try {
    bool found = false;
    for (Route const& route : routes) {
      if (!route.leads_to(request.path)) continue;
      if (route.for_control && !request.control) {
        return {.status = 403, .body = "only over the socket of --control\n"};
      }
      found = true;
      if (route.method == request.method) return (this->*route.answer)(request);
    }
    return {.status = found ? 405 : 404, .body = found ? "not by this method\n" : "not found\n"};
  } catch (Unanswered const& error) {
    return {.status = 503, .body = concat(error.what(), "\n")};
  } catch (std::future_error const&) {
    return {.status = 503, .body = "the aggregator is ending\n"};
  } catch (InvalidArgument const& error) {
    return {.status = 400, .body = concat(error.what(), "\n")};
  } catch (std::exception const& error) {
    return {.status = 500, .body = concat(error.what(), "\n")};
  }
}

HttpReply Service::metrics(HttpRequest const& /*request*/) const {
  auto const [report, tokens] =
      ask([this](AggregatorServer& server) { return std::pair(server.report(), tokens_()); });
  return {.body = metrics_text(report, tokens), .type = metrics_type};
}

HttpReply Service::health(HttpRequest const& /*request*/) const {
  ask([](AggregatorServer&) { return true; });
  return {.body = "ok\n"};
}

HttpReply Service::readiness(HttpRequest const& /*request*/) const {
  AggregatorReport const report = ask([](AggregatorServer& server) { return server.report(); });
  if (report.ready()) return {.body = "ready\n"};
  return {.status = 503, .body = report.draining ? "draining\n" : "all connections are taken\n"};
}

HttpReply Service::jobs(HttpRequest const& /*request*/) const {
  AggregatorReport const report = ask([](AggregatorServer& server) { return server.report(); });
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (InaJobReport const& job : report.jobs) list.push_back(json_of(job, report.now));
  return json({{"jobs", std::move(list)}});
}

HttpReply Service::end_job(HttpRequest const& request) const {
  std::string const asked = request.path.substr(jobs_folder.size());
  bool const ended = ask([asked](AggregatorServer& server) {
    for (InaJobReport const& job : server.report().jobs) {
      if (name(job.id) == asked) return server.end_job(job.id);
    }
    return false;
  });
  if (ended) return json({{"ended", asked}});
  return {.status = 404, .body = concat("there is no job ", asked, "\n")};
}

HttpReply Service::drain(HttpRequest const& request) const {
  Duration limit = drain_;
  for (auto const& [key, value] : request.query) {
    require(key == "limit", "unknown parameter \"", key, "\", must be limit");
    limit = parse_drain(key, value);
  }
  std::size_t const jobs = ask([limit](AggregatorServer& server) {
    server.drain(limit);
    return server.report().jobs.size();
  });
  return json({{"draining", jobs}, {"limit_seconds", seconds_of(limit)}});
}

}  // namespace sparsecomm
