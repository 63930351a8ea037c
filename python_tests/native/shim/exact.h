// What the drivers of the shim share: arrays of exactly their size, so that AddressSanitizer sees a step outside.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

// Not a std::vector, because of std::vector<bool>.
template <typename T>
struct Exact {
  Exact(const T* source, int64_t size) : memory(source == nullptr ? nullptr : new T[size]) {
    if (source != nullptr) std::copy_n(source, size, memory);
  }
  ~Exact() { delete[] memory; }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  T* memory;
};

// Keeps the text for the caller until the next call.
inline const char* report(const std::string& problem) {
  static std::string text;
  text = problem;
  return text.c_str();
}
