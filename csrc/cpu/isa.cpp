#include "cpu/isa.h"

#if defined(ITM_FAST_HAVE_AMX)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace itm_fast {
namespace {

#if defined(ITM_FAST_HAVE_AMX)
// Whether the processor has bfloat16 tiles and the operating system allows their use. Linux grants their memory to
// processes that request it once. No such request is known for other systems, so they do not use tiles.
bool has_amx() {
#if defined(__linux__)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kBf16) == 0 || (edx & kTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
std::vector<Isa> available_isas() {
  std::vector<Isa> isas{Isa::portable};
#ifdef ITM_FAST_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    isas.push_back(Isa::avx2);
  }
#endif
#ifdef ITM_FAST_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
    isas.push_back(Isa::avx512);
#ifdef ITM_FAST_HAVE_AMX
    if (__builtin_cpu_supports("avx512bf16")) {
      isas.push_back(Isa::avx512_bf16);
      if (has_amx()) isas.push_back(Isa::amx);
    }
#endif
  }
#endif
  return isas;
}

Isa choose_isa() {
  const std::vector<Isa> available = available_isas();
  const char* wanted = std::getenv("ITM_FAST_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    return available.back();
  }
  for (const Isa isa : available) {
    if (std::string(wanted) == isa_name(isa)) {
      return isa;
    }
  }
  throw std::runtime_error("ITM_FAST_CPU_ISA='" + std::string(wanted) + "' is not available: expected one of " +
                           available_isa_names());
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::amx:
      return "amx";
  }
  return "unknown";
}

std::string available_isa_names() {
  std::string names;
  for (const Isa isa : available_isas()) {
    if (!names.empty()) names += ", ";
    names += isa_name(isa);
  }
  return names;
}

Isa selected_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

}  // namespace itm_fast
