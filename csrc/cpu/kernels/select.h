// Picks a family's kernel table for the instruction set chosen at run time.
#pragma once

#include "cpu/isa.h"

#ifdef ITM_FAST_HAVE_AVX512
#define ITM_FAST_CASE_AVX512(table) \
  case Isa::amx:                    \
  case Isa::avx512_bf16:            \
  case Isa::avx512:                 \
    return avx512::table;
#else
#define ITM_FAST_CASE_AVX512(table)
#endif
#ifdef ITM_FAST_HAVE_AVX2
#define ITM_FAST_CASE_AVX2(table) \
  case Isa::avx2:                 \
    return avx2::table;
#else
#define ITM_FAST_CASE_AVX2(table)
#endif

// The body of a function inside namespace itm_fast that returns a reference to `<instruction set>::table`.
#define ITM_FAST_RETURN_SELECTED(table) \
  switch (selected_isa()) {             \
    ITM_FAST_CASE_AVX512(table)         \
    ITM_FAST_CASE_AVX2(table)           \
    default:                            \
      return portable::table;           \
  }
