#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/isa.h"

namespace itm_fast {
namespace {

std::string cpu_instruction_set() { return isa_name(selected_isa()); }

}  // namespace
}  // namespace itm_fast

// The operators have no tensor argument, so the dispatcher needs a kernel for every backend.
STABLE_TORCH_LIBRARY_IMPL(itm_fast, CompositeExplicitAutograd, m) {
  m.impl("available_cpu_instruction_sets", TORCH_BOX(&itm_fast::available_isa_names));
  m.impl("cpu_instruction_set", TORCH_BOX(&itm_fast::cpu_instruction_set));
}
