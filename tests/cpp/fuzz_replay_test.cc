#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "../fuzz/frame_fuzz.h"

namespace sparsecomm {
namespace {

TEST(FuzzReplay, EveryFileOfTheFrameCorpus) {
  std::size_t files = 0;
  for (auto const& entry : std::filesystem::directory_iterator(SPARSECOMM_FUZZ_CORPUS "/frame")) {
    SCOPED_TRACE(entry.path().string());
    std::ifstream file(entry.path(), std::ios::binary);
    std::string const data{std::istreambuf_iterator<char>(file), {}};
    fuzz::run(std::as_bytes(std::span(data)));
    ++files;
  }
  EXPECT_GE(files, 20u);
}

}  // namespace
}  // namespace sparsecomm
