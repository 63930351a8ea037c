// The pybind11 module itm_fast._host: what is no tensor operator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <vector>

#include "build_config.h"

namespace py = pybind11;

namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ';');) {
    parts.push_back(part);
  }
  return parts;
}

py::dict build_information() {
  py::dict info;
  info["version"] = ITM_FAST_VERSION;
  info["compiler"] = ITM_FAST_COMPILER;
  info["build_type"] = ITM_FAST_BUILD_TYPE;
  info["torch"] = ITM_FAST_TORCH_VERSION;
  info["python"] = ITM_FAST_PYTHON_VERSION;
  info["instruction_sets"] = split(ITM_FAST_INSTRUCTION_SETS);
  info["cuda_architectures"] = split(ITM_FAST_CUDA_ARCHITECTURES);
  return info;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Build information of itm_fast.";
  m.def("build_information", &build_information,
        "What the build knew: version, compiler, build_type, torch and python (built against), instruction_sets and "
        "cuda_architectures compiled.");
}
