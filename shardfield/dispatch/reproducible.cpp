#include "shardfield/dispatch/reproducible.h"

namespace shardfield::dispatch {

namespace {
thread_local int ordinary_depth = 0;
}  // namespace

namespace detail {

std::atomic<bool> reproducible{false};

bool is_reproducible_here() {
  return ordinary_depth == 0;
}

ReproducibleForm& reproducible_form(const std::string& name) {
  static auto* forms = new std::map<std::string, std::unique_ptr<ReproducibleForm>>();
  auto& form = (*forms)[name];
  if (!form) form = std::make_unique<ReproducibleForm>();
  return *form;
}

}  // namespace detail

void set_reproducible(bool on) {
  detail::reproducible = on;
}

bool is_reproducible() {
  return detail::reproducible.load(std::memory_order_relaxed) && detail::is_reproducible_here();
}

OrdinaryArithmetic::OrdinaryArithmetic() {
  ++ordinary_depth;
}
OrdinaryArithmetic::~OrdinaryArithmetic() {
  --ordinary_depth;
}

}  // namespace shardfield::dispatch
