// Shared by the drivers of the shim: arrays of exact size, so that AddressSanitizer finds out-of-bounds accesses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

// std::vector does not fit, because std::vector<bool> packs its elements.
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
