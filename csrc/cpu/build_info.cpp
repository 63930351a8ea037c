#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/isa.h"

namespace itm_fast {
namespace {

std::string cpu_instruction_set() { return isa_name(selected_isa()); }

}  // namespace
}  // namespace itm_fast

// No tensor argument, so no tensor decides the backend.
STABLE_TORCH_LIBRARY_IMPL(itm_fast, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&itm_fast::cpu_instruction_set));
}
