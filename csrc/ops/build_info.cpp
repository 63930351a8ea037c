#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  // The instruction set in use, and all that this processor supports, joined by ", ", slowest first.
  m.def("cpu_instruction_set() -> str");
  m.def("available_cpu_instruction_sets() -> str");
}
