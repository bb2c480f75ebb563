#include "ina/message_path.h"

namespace sparsecomm {

std::unique_ptr<UcxMessages> open_ucx_messages(MessageOptions const& options,
                                               std::size_t connections, std::string* why_not) {
  if (options.transport == MessageTransport::tcp) return nullptr;
  UcxOptions ucx = options.ucx;
  if (options.transport == MessageTransport::automatic) {
    // Its TCP takes twice a socket's time. What the user sets comes later, and prevails.
    ucx.settings.insert(ucx.settings.begin(), {"TLS", "^tcp"});
  }
  try {
    return make_ucx_messages(ucx, connections);
  } catch (Error const& error) {
    require<TransportUnavailable>(options.transport != MessageTransport::ucx, error.what());
    if (why_not != nullptr) *why_not = error.what();
    return nullptr;
  }
}

}  // namespace sparsecomm
