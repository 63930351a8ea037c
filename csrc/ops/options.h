// Options that are passed as strings.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace itm_fast {

// The enumerator of `value`; `names` has the order of the enumeration.
template <typename Enum, size_t N>
Enum parse_option(const char* argument, const std::string& value, const std::array<std::string_view, N>& names) {
  for (size_t i = 0; i < N; ++i) {
    if (names[i] == value) return static_cast<Enum>(i);
  }
  STD_TORCH_CHECK(false, argument, ": unknown option '", value, "'");
}

}  // namespace itm_fast
