// Run-time choice of the instruction set that the CPU kernels use.
#pragma once

#include <string>

namespace itm_fast {

// From avx512_bf16 on, products of bfloat16 have instructions of their own; everything else runs as with avx512.
enum class Isa { portable, avx2, avx512, avx512_bf16, amx };

// What is both compiled in and supported by the processor and the operating system, from the plainest to the best:
// "portable, avx2".
std::string available_isa_names();

// The instruction set of this process: the one that ITM_FAST_CPU_ISA names, else the best available one. Chosen at the
// first call and kept; throws std::runtime_error where ITM_FAST_CPU_ISA names one that is not available.
Isa selected_isa();

const char* isa_name(Isa isa);

}  // namespace itm_fast
