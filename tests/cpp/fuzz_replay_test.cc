#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

#include "../fuzz/frame_fuzz.h"
#include "../fuzz/ina_fuzz.h"
#include "../fuzz/text_fuzz.h"

namespace sparsecomm {
namespace {

std::size_t replay(std::string const& corpus, void (*run)(std::span<const std::byte>)) {
  std::size_t files = 0;
  for (auto const& entry :
       std::filesystem::directory_iterator(SPARSECOMM_FUZZ_CORPUS "/" + corpus)) {
    SCOPED_TRACE(entry.path().string());
    std::ifstream file(entry.path(), std::ios::binary);
    std::string const data{std::istreambuf_iterator<char>(file), {}};
    run(std::as_bytes(std::span(data)));
    ++files;
  }
  return files;
}

TEST(FuzzReplay, EveryFileOfTheFrameCorpus) { EXPECT_GE(replay("frame", fuzz::run), 20u); }

TEST(FuzzReplay, EveryFileOfTheAggregationCorpus) { EXPECT_GE(replay("ina", fuzz::run_ina), 22u); }

TEST(FuzzReplay, EveryFileOfTheTextCorpus) { EXPECT_GE(replay("text", fuzz::run_text), 10u); }

}  // namespace
}  // namespace sparsecomm
