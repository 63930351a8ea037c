// Shared by forward and backward of the regulators on the CPU: kernels, sizes, and the weights, packed once per call.
#pragma once

#include "cpu/cross_attention.h"
#include "cpu/kernels/regulators.h"
#include "ops/regulators.h"

namespace itm_fast {

inline const RegulatorKernels<float>& exact_kernels(float) { ITM_FAST_RETURN_SELECTED(kRegulatorsFloat32) }
inline const RegulatorKernels<double>& exact_kernels(double) { ITM_FAST_RETURN_SELECTED(kRegulatorsFloat64) }
inline const RegulatorBackwardKernels<float>& backward_kernels(float) {
  ITM_FAST_RETURN_SELECTED(kRegulatorsBackwardFloat32)
}
inline const RegulatorBackwardKernels<double>& backward_kernels(double) {
  ITM_FAST_RETURN_SELECTED(kRegulatorsBackwardFloat64)
}

// Sizes that do not depend on the tiles.
template <typename T>
RegulatorSizes regulator_sizes(const Operand<T>& queries, const Operand<T>& contexts, const RegulatorWeights& weights,
                               const RegulatorOptions& options) {
  RegulatorSizes sizes{};
  sizes.contexts = contexts.max_length;
  sizes.dim = queries.view.dim;
  sizes.width = weights.width;
  sizes.hidden = weights.hidden;
  sizes.has_channels = options.n_correspondences > 0 || options.learned_factors;
  return sizes;
}

template <typename T>
class PackedRegulators {
 public:
  // Packs for the backward, too, unless its kernels are null.
  PackedRegulators(const RegulatorWeights& weights, const RegulatorOptions& options, const RegulatorKernels<T>& kernels,
                   const RegulatorBackwardKernels<T>* backward = nullptr)
      : kernels_(kernels), backward_(backward) {
    for (const LinearWeights& step : weights.alignments) alignments_.push_back(layer(step));
    for (const CorrespondenceWeights& step : weights.correspondences) {
      correspondences_.push_back(
          {layer(step.w1), layer(step.w2), layer(step.w3), plain(step.w4.weight), plain(step.w4.bias)});
    }
    for (const AggregationWeights& step : weights.aggregations) {
      aggregations_.push_back({layer(step.a), layer(step.b), plain(step.v.weight), plain(step.v.bias)});
    }
    layers.alignments = alignments_.data();
    layers.correspondences = correspondences_.data();
    layers.aggregations = aggregations_.data();
    if (options.scored) {
      layers.u = plain(weights.score.weight);
      layers.u0 = plain(weights.score.bias);
    }
    if (options.learned_factors) {
      layers.channels = plain(weights.factors.weight);
      layers.temperature = plain(weights.factors.bias);
    }
    torch::stable::parallel_for(0, static_cast<int64_t>(jobs_.size()), 1, [&](int64_t first, int64_t last) {
      Buffer<T> line(kLineCells);
      for (int64_t i = first; i < last; ++i) {
        const Job& job = jobs_[i];
        (job.transposed ? backward_->pack_transposed : kernels_.pack)(job.weight, job.outputs, job.inputs, line.data(),
                                                                      job.packed);
      }
    });
  }

  PackedRegulators(const PackedRegulators&) = delete;
  PackedRegulators& operator=(const PackedRegulators&) = delete;

  RegulatorLayers<T> layers{};

 private:
  struct Job {
    const T* weight;
    int64_t outputs, inputs;
    T* packed;
    bool transposed;
  };

  // Contiguous values that live as long as this object.
  const T* plain(const torch::stable::Tensor& tensor) {
    kept_.push_back(torch::stable::contiguous(torch::stable::to(tensor, kScalarType<T>)));
    return static_cast<const T*>(kept_.back().data_ptr());
  }

  RegulatorLayer<T> layer(const LinearWeights& linear) {
    const int64_t outputs = linear.weight.size(0), inputs = linear.weight.size(1);
    const T* weight = plain(linear.weight);
    buffers_.emplace_back(kernels_.packed_size(outputs, inputs));
    T *packed = buffers_.back().data(), *transposed = nullptr;
    jobs_.push_back({weight, outputs, inputs, packed, false});
    if (backward_ != nullptr) {
      buffers_.emplace_back(backward_->transposed_size(outputs, inputs));
      transposed = buffers_.back().data();
      jobs_.push_back({weight, outputs, inputs, transposed, true});
    }
    const int64_t padded = (outputs + kBiasStep - 1) / kBiasStep * kBiasStep;
    buffers_.emplace_back(padded);
    T* bias = buffers_.back().data();
    const T* values = plain(linear.bias);
    for (int64_t i = 0; i < padded; ++i) bias[i] = i < outputs ? values[i] : T(0);
    return {packed, transposed, bias, outputs, inputs};
  }

  const RegulatorKernels<T>& kernels_;
  const RegulatorBackwardKernels<T>* backward_;
  std::vector<Buffer<T>> buffers_;
  std::vector<torch::stable::Tensor> kept_;
  std::vector<Job> jobs_;
  std::vector<RegulatorLayer<T>> alignments_;
  std::vector<CorrespondenceLayers<T>> correspondences_;
  std::vector<AggregationLayers<T>> aggregations_;
};

}  // namespace itm_fast
