// The pybind11 module itm_fast._host: native code other than tensor operators.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "build_config.h"
#include "shard_reader.h"

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

using itm_fast::host::File;
using itm_fast::host::Outcome;
using itm_fast::host::Problem;
using itm_fast::host::Row;
using itm_fast::host::ShardReader;
using itm_fast::host::Type;

Type type_of(const std::string& name) {
  static const std::map<std::string, Type> types = {{"bf16", Type::bf16}, {"fp16", Type::fp16}, {"fp32", Type::fp32}};
  const auto found = types.find(name);
  if (found == types.end()) {
    throw py::value_error("expected one of bf16, fp16, fp32, got " + name);
  }
  return found->second;
}

const char* name_of(Problem problem) {
  switch (problem) {
    case Problem::changed:
      return "changed";
    case Problem::short_read:
      return "short read";
    case Problem::not_readable:
      return "not readable";
    case Problem::not_finite:
      return "not finite";
    default:
      return "";
  }
}

using Numbers = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

std::unique_ptr<ShardReader> make_reader(
    const std::vector<std::tuple<std::string, std::int64_t, std::int64_t, std::uint64_t>>& files,
    const std::string& stored, std::size_t most_open) {
  std::vector<File> described;
  for (const auto& [path, bytes, modified, inode] : files) {
    described.push_back({path, bytes, modified, inode});
  }
  return std::make_unique<ShardReader>(std::move(described), type_of(stored), most_open);
}

// Whether a buffer is contiguous in row-major order.
bool is_contiguous(const py::buffer_info& buffer) {
  py::ssize_t expected = buffer.itemsize;
  for (py::ssize_t d = buffer.ndim - 1; d >= 0; --d) {
    if (buffer.shape[d] != 1 && buffer.strides[d] != expected) {
      return buffer.size == 0;
    }
    expected *= buffer.shape[d];
  }
  return true;
}

py::tuple gather(const ShardReader& reader, const Numbers& rows, const py::buffer& buffer, const std::string& wanted,
                 int threads) {
  const Type type = type_of(wanted);
  if (type != Type::fp32 && type != reader.stored()) {
    throw py::value_error("expected fp32 or the type that the files hold, got " + wanted);
  }
  if (rows.ndim() != 2 || rows.shape(1) != 4) {
    throw py::value_error("rows: expected shape (n, 4)");
  }
  const py::buffer_info place = buffer.request(true);
  if (!is_contiguous(place)) {
    throw py::value_error("buffer: expected contiguous memory");
  }
  const auto size = static_cast<std::int64_t>(itm_fast::host::size_of(type));
  const std::int64_t capacity = static_cast<std::int64_t>(place.size) * place.itemsize / size;
  std::vector<Row> described;
  described.reserve(rows.shape(0));
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    const Row row{rows.at(i, 0), rows.at(i, 1), rows.at(i, 2), rows.at(i, 3)};
    if (row.file < 0 || row.file >= static_cast<std::int64_t>(reader.files()) || row.offset < 0 || row.values < 0 ||
        row.destination < 0 || row.values > capacity || row.destination > capacity - row.values) {
      throw py::value_error("rows: row " + std::to_string(i) + " leads outside the files or the buffer");
    }
    described.push_back(row);
  }
  Outcome outcome;
  {
    const py::gil_scoped_release release;
    outcome = reader.gather(described, place.ptr, type, threads);
  }
  return py::make_tuple(name_of(outcome.problem), outcome.row, outcome.detail);
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Build information of itm_fast, and the reader of its feature stores.";
  m.def("build_information", &build_information,
        "Return the version, compiler, build_type, versions of torch and python at build time, and the compiled "
        "instruction_sets and cuda_architectures.");
  py::class_<ShardReader>(
      m, "ShardReader",
      "Read rows of numbers from files. Arguments: a list of (path, bytes, modification time in nanoseconds, "
      "inode), the stored type (bf16, fp16 or fp32), and the maximum number of open files.")
      .def(py::init(&make_reader), py::arg("files"), py::arg("stored"), py::arg("most_open") = 256)
      .def("gather", &gather, py::arg("rows"), py::arg("buffer"), py::arg("wanted"), py::arg("threads"),
           "Fill a buffer with numbers of the type `wanted`, fp32 or the stored type, without the GIL. `rows`: (n, 4) "
           "int64; the file of each row, the byte at which it starts, its count of numbers, and its position in the "
           "buffer. Return the first problem (its kind or an empty text), its row, and an errno or a number of bytes.");
}
