// The weights of the regulators, packed once per call into the layout of the CPU kernels.
#pragma once

#include "cpu/cross_attention.h"
#include "cpu/kernels/regulators.h"
#include "ops/regulators.h"

namespace itm_fast {

template <typename T>
class PackedRegulators {
 public:
  PackedRegulators(const RegulatorWeights& weights, const RegulatorOptions& options, const RegulatorKernels<T>& kernels)
      : kernels_(kernels) {
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
        kernels_.pack(job.weight, job.outputs, job.inputs, line.data(), job.packed);
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
  };

  // Contiguous values that live as long as this object.
  const T* plain(const torch::stable::Tensor& tensor) {
    kept_.push_back(torch::stable::contiguous(torch::stable::to(tensor, kScalarType<T>)));
    return static_cast<const T*>(kept_.back().data_ptr());
  }

  RegulatorLayer<T> layer(const LinearWeights& linear) {
    const int64_t outputs = linear.weight.size(0), inputs = linear.weight.size(1);
    buffers_.emplace_back(kernels_.packed_size(outputs, inputs));
    T* packed = buffers_.back().data();
    jobs_.push_back({plain(linear.weight), outputs, inputs, packed});
    const int64_t padded = (outputs + kBiasStep - 1) / kBiasStep * kBiasStep;
    buffers_.emplace_back(padded);
    T* bias = buffers_.back().data();
    const T* values = plain(linear.bias);
    for (int64_t i = 0; i < padded; ++i) bias[i] = i < outputs ? values[i] : T(0);
    return {packed, bias, outputs, inputs};
  }

  const RegulatorKernels<T>& kernels_;
  std::vector<Buffer<T>> buffers_;
  std::vector<torch::stable::Tensor> kept_;
  std::vector<Job> jobs_;
  std::vector<RegulatorLayer<T>> alignments_;
  std::vector<CorrespondenceLayers<T>> correspondences_;
  std::vector<AggregationLayers<T>> aggregations_;
};

}  // namespace itm_fast
