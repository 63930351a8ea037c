#include "itm_fast/cpu/triplet_loss.h"
#include "itm_fast/cpu/triplet_gradient.h"

namespace itm_fast::ITM_FAST_ISA {

const TripletKernels<float> kTripletFloat32{scan_block<float>, spread_block<float>, scale_elements<float>};
const TripletKernels<double> kTripletFloat64{scan_block<double>, spread_block<double>, scale_elements<double>};

}  // namespace itm_fast::ITM_FAST_ISA
