#include "itm_fast/cpu/retrieval.h"

namespace itm_fast::ITM_FAST_ISA {

const RetrievalKernels<float> kRetrievalFloat32{count_rows<float>};
const RetrievalKernels<double> kRetrievalFloat64{count_rows<double>};

}  // namespace itm_fast::ITM_FAST_ISA
