#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) { m.def("cpu_instruction_set() -> str"); }
