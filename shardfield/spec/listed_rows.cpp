#include "shardfield/spec/listed_rows.h"

#include <map>
#include <utility>

namespace shardfield::spec {

namespace {

std::map<std::pair<const Layout*, int64_t>, const Layout*>& table() {
  static thread_local std::map<std::pair<const Layout*, int64_t>, const Layout*> named;
  return named;
}

}  // namespace

void remember_listed_rows(const Layout* list, const Layout* rows) {
  if (list && rows) table()[{list, rows->cuts()[0].total()}] = rows;
}

const Layout* listed_rows(const Layout* list, int64_t num_rows) {
  const auto found = table().find({list, num_rows});
  return found == table().end() ? nullptr : found->second;
}

}  // namespace shardfield::spec
