#include "ops/retrieval.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "ops/devices.h"

namespace itm_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_retrieval(const Tensor& scores, const Tensor& caption_image) {
  STD_TORCH_CHECK(scores.dim() == 2, "scores: expected shape (n_images, n_captions), got ", scores.dim(),
                  " dimensions");
  STD_TORCH_CHECK(scores.scalar_type() == ScalarType::Float || scores.scalar_type() == ScalarType::Double,
                  "scores: expected float32 or float64");
  STD_TORCH_CHECK(caption_image.scalar_type() == ScalarType::Long && caption_image.dim() == 1 &&
                      caption_image.size(0) == scores.size(1),
                  "caption_image: expected int64 of shape (", scores.size(1), ",)");
  check_same_device("caption_image", caption_image, "scores", scores);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def("retrieval_ranks(Tensor scores, Tensor caption_image, bool pessimistic) -> (Tensor, Tensor)");
}
#endif
