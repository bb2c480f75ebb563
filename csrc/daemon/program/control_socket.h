// A Unix socket in the file system, for the user that made it.
#pragma once

#include <string>

#include "transport/process.h"

namespace sparsecomm {

// Takes the place of a socket at which nobody listens any more. Throws InvalidArgument if the path
// is too long, AddressError if something else is there or the socket cannot be made.
FileDescriptor listen_at_path(std::string const& path);

}  // namespace sparsecomm
