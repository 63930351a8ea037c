// Large pages for large results.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace itm_fast {

// Asks for 2 MB pages before memory is written for the first time. Without them, a new result of many megabytes costs
// more in page faults, one per 4 kB, than in writing. This is a hint: it never changes a result.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace itm_fast
