// Our errors as those that torch.distributed's users catch.
#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include "base/error.h"

namespace sparsecomm {

// A lost peer, a timeout or an aborted operation becomes torch.distributed.DistBackendError, in
// Python too; other errors stay what they are.
inline std::exception_ptr as_distributed_error(std::exception_ptr const& error) {
  auto const convert = [function = __func__](std::exception const& exception) {
    return std::make_exception_ptr(
        c10::DistBackendError(c10::SourceLocation{function, __FILE__, __LINE__}, exception.what()));
  };
  try {
    std::rethrow_exception(error);
  } catch (PeerError const& peer_error) {
    return convert(peer_error);
  } catch (Aborted const& aborted) {
    return convert(aborted);
  } catch (...) {
    return error;
  }
}

}  // namespace sparsecomm
