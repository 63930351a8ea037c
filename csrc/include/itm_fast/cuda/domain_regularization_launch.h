// The grids of domain_regularization. Host code, shared by the launchers and the tests.
#pragma once

#include "itm_fast/cuda/domain_regularization.h"
#include "itm_fast/cuda/domain_regularization_backward.h"

namespace itm_fast::cuda {

template <typename S>
int64_t risk_blocks(const DomainProblem<S>& p) {
  return p.kinds * p.pairs;
}

template <typename S>
int64_t discriminator_blocks(const DomainProblem<S>& p) {
  return p.pairs * ((p.dim + kDomainThreads) / kDomainThreads);
}

template <typename S>
int64_t feature_blocks(const DomainProblem<S>& p) {
  return p.pairs * kDomainShares;
}

}  // namespace itm_fast::cuda
