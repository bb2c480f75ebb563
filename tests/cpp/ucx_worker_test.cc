// Workers of UCX that serve something other than ranks.
#include "transport/ucx_worker.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/process.h"
#include "ucx_ranks.h"

namespace sparsecomm::test {
namespace {

constexpr unsigned message_id = 7;

class UcxWorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    load_ucx_modules();
    if (std::string const problem = ucx_problem(ucx_options_here()); !problem.empty()) {
      GTEST_SKIP() << problem;
    }
  }
};

// Collects what active messages bring.
ucs_status_t received(void* texts, void const* /*header*/, std::size_t /*header_bytes*/, void* data,
                      std::size_t bytes, ucp_am_recv_param_t const* /*param*/) {
  static_cast<std::vector<std::string>*>(texts)->emplace_back(static_cast<char const*>(data),
                                                              bytes);
  return UCS_OK;
}

void ignore_failure(void* /*user*/, ucp_ep_h /*endpoint*/, ucs_status_t /*status*/) {}

TEST_F(UcxWorkerTest, ActiveMessagesGoFromOneToAnother) {
  UcxWorker first(ucx_options_here(), UCP_FEATURE_AM, 1);
  UcxWorker second(ucx_options_here(), UCP_FEATURE_AM, 1);
  std::vector<std::string> texts;
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = message_id;
  handler.cb = received;
  handler.arg = &texts;
  ASSERT_EQ(second.ucx().ucp_worker_set_am_recv_handler(second.get(), &handler), UCS_OK);

  ucp_ep_h endpoint = nullptr;
  ASSERT_EQ(first.connect(second.address(), ignore_failure, nullptr, endpoint), UCS_OK);
  std::string const text = "for slot 3";
  ucp_request_param_t param{};
  void* const request = first.ucx().ucp_am_send_nbx(endpoint, message_id, nullptr, 0, text.data(),
                                                    text.size(), &param);
  ASSERT_FALSE(UCS_PTR_IS_ERR(request));
  Deadline const deadline = soon();
  while (texts.empty() && !deadline.passed()) {
    first.progress();
    second.progress();
  }
  EXPECT_EQ(texts, std::vector{text});
  if (request != nullptr) first.ucx().ucp_request_free(request);
  first.close(std::array{endpoint}, long_time());
}

TEST_F(UcxWorkerTest, SleepEndsWithAFileOrWithTheLimit) {
  UcxWorker worker(ucx_options_here(), UCP_FEATURE_AM, 1);
  FileDescriptor const file(::eventfd(0, EFD_CLOEXEC));
  auto const sleep = [&](Duration limit) {
    while (worker.progress()) {
    }
    TimePoint const started = steady_clock().now();
    EXPECT_FALSE(worker.sleep({-1, file.get()}, limit));
    return steady_clock().now() - started;
  };
  EXPECT_GE(sleep(std::chrono::milliseconds(20)), std::chrono::milliseconds(20));
  ASSERT_EQ(::eventfd_write(file.get(), 1), 0);
  EXPECT_LT(sleep(long_time()), long_time() / 2);
}

TEST_F(UcxWorkerTest, AWorkerThatUcxRefusesSaysWhy) {
  UcxOptions options = ucx_options_here();
  options.settings.emplace_back("NO_SUCH_SETTING", "1");
  try {
    UcxWorker const worker(options, UCP_FEATURE_AM, 1);
    ADD_FAILURE() << "UCX took NO_SUCH_SETTING";
  } catch (Error const& error) {
    EXPECT_NE(std::string_view(error.what()).find("NO_SUCH_SETTING=1"), std::string_view::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace sparsecomm::test
