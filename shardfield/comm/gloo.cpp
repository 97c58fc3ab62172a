// The only file that sees Gloo's names: libtorch exports its Gloo group but not Gloo's headers.
#include "shardfield/comm/gloo.h"

#include <csignal>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "shardfield/comm/in_process.h"

namespace shardfield::comm {

void survive_closed_connections() {
  struct sigaction now;
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
    std::signal(SIGPIPE, SIG_IGN);
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout) {
  return make_gloo_on("127.0.0.1", store, rank, size, timeout);
}

c10::intrusive_ptr<c10d::Backend> make_gloo_on(const std::string& host,
                                               const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout) {
  survive_closed_connections();
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->timeout = timeout;
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host, false));
  options->threads = 2;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace shardfield::comm
