// Choose the instruction set of the CPU kernels at run time.
#pragma once

#include <string>

namespace itm_fast {

// From avx512_bf16 on, bfloat16 products have dedicated instructions; everything else runs as with avx512.
enum class Isa { portable, avx2, avx512, avx512_bf16, amx };

// The instruction sets that are compiled in and that the processor and the operating system support, slowest first:
// "portable, avx2".
std::string available_isa_names();

// The instruction set of this process: the one that ITM_FAST_CPU_ISA names, else the fastest available one. Chosen at
// the first call and kept. Throws std::runtime_error if ITM_FAST_CPU_ISA names one that is not available.
Isa selected_isa();

const char* isa_name(Isa isa);

}  // namespace itm_fast
