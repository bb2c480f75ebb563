// What differs between the proposals of ranks that disagree.
#pragma once

#include <span>
#include <string>

namespace sparsecomm {

// texts[r] is rank r's, as "name=value;name=value". Returns each field that differs, with the ranks
// that have each value: "numel: 10 on ranks 0, 1 but 12 on rank 2; dtype: ...".
std::string differences(std::span<const std::string> texts);

}  // namespace sparsecomm
