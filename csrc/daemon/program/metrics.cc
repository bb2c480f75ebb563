#include "daemon/program/metrics.h"

#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"
#include "daemon/program/number_text.h"

namespace sparsecomm {
namespace {

class Metrics {
 public:
  void begin(std::string_view name, std::string_view type, std::string_view help) {
    name_ = concat("sparsecomm_aggregator_", name);
    text_ += concat("# HELP ", name_, " ", help, "\n# TYPE ", name_, " ", type, "\n");
  }
  // One of a family that has begun.
  void add(std::string_view suffix, std::string_view labels, auto const& value) {
    text_ += concat(name_, suffix, labels.empty() ? "" : "{", labels, labels.empty() ? "" : "}",
                    " ", value, "\n");
  }
  void counter(std::string_view name, std::string_view help, std::uint64_t value) {
    begin(name, "counter", help);
    add("", "", value);
  }
  void gauge(std::string_view name, std::string_view help, std::size_t value) {
    begin(name, "gauge", help);
    add("", "", value);
  }
  std::string const& text() const { return text_; }

 private:
  std::string text_, name_;
};

void add_rounds(Metrics& metrics, InaCounts const& counts) {
  metrics.begin("round_seconds", "histogram",
                "Time from an update, or the beginning of an operation, to the next update.");
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < counts.rounds.size(); ++i) {
    sum += counts.rounds[i];
    bool const last = i == InaCounts::round_bounds.size();
    metrics.add(
        "_bucket",
        last ? "le=\"+Inf\"" : concat("le=\"", number_text(InaCounts::round_bounds[i]), "\""), sum);
  }
  metrics.add("_sum", "", number_text(counts.round_seconds));
  metrics.add("_count", "", sum);
}

}  // namespace

std::string metrics_text(AggregatorReport const& report, std::size_t tokens) {
  InaCounts const& counts = report.counts;
  Metrics metrics;
  metrics.begin("build_info", "gauge", "Always 1; the release is its label.");
  metrics.add("", "version=\"" SPARSECOMM_VERSION "\"", 1);
  metrics.counter("operations_total", "Reductions that were completed.", counts.operations);
  metrics.begin("refusals_total", "counter", "Operations that were refused or have failed.");
  for (RefusalReasonEntry const& entry : refusal_reasons()) {
    metrics.add("", concat("reason=\"", entry.name, "\""),
                counts.refusals[static_cast<std::size_t>(entry.reason) - 1]);
  }
  add_rounds(metrics, counts);
  metrics.counter("blocks_received_total",
                  "Blocks that workers have sent for completed operations.", counts.blocks);
  metrics.counter("blocks_zero_total",
                  "Blocks that workers have not sent for completed operations, as they were zero.",
                  counts.zero_blocks);
  metrics.counter("received_bytes_total", "Bytes of messages from workers.", counts.received_bytes);
  metrics.counter("sent_bytes_total", "Bytes of messages to workers.", counts.sent_bytes);
  metrics.gauge("connections", "Connections that are open.", report.connections);
  metrics.gauge("connections_limit", "Connections that may be open.", report.most_connections);
  metrics.begin("connections_closed_total", "counter", "Connections that were closed.");
  for (CloseCauseEntry const& entry : close_causes()) {
    metrics.add("", concat("cause=\"", entry.name, "\""),
                report.closed[static_cast<std::size_t>(entry.cause)]);
  }
  metrics.gauge("jobs", "Jobs that have connections.", report.jobs.size());
  metrics.counter("jobs_total", "Jobs that have begun.", report.begun_jobs);
  metrics.gauge("memory_bytes", "Memory that operations have been admitted to.", report.memory);
  metrics.gauge("memory_limit_bytes", "Memory that operations may be admitted to.",
                report.most_memory);
  metrics.gauge("draining", "Whether no more jobs are taken.", report.draining ? 1 : 0);
  metrics.gauge("tokens", "Tokens that let workers in; 0 if none are asked for.", tokens);
  return metrics.text();
}

}  // namespace sparsecomm
