// Counter-based dropout on a GPU: the mask depends on the seed and the position.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/philox.h"

namespace itm_fast::cuda {

// The position of a mask: a query row and a context set of the whole call, and a stream.
struct DropoutPlace {
  int64_t row, context;
  int stream;
};

class ChannelDropout {
 public:
  // `seed` is on the device, and null without dropout.
  ITM_FAST_DEVICE ChannelDropout(const CounterDropout& dropout, const int64_t* seed)
      : dropout_(dropout),
        drops_(seed != nullptr),
        kept_(drops_ ? 1.0f / static_cast<float>(1.0 - dropout.probability) : 1.0f) {
    if (drops_) dropout_.set_key(*seed);
  }

  // Calls body(c, factor) for `count` channels from `first` on, a multiple of 4: the factor is 0 or 1 / (1 -
  // probability), or 1 without dropout. For a warp; a lane takes the four channels of a counter.
  template <typename Body>
  ITM_FAST_DEVICE void for_each_channel(const DropoutPlace& place, int first, int count, const Body& body) const {
    for (int four = 4 * lane(); four < count; four += 4 * 32) {
      uint64_t words[4] = {static_cast<uint32_t>(place.row), static_cast<uint32_t>(place.context),
                           static_cast<uint32_t>(place.stream), static_cast<uint32_t>((first + four) / 4)};
      if (drops_) philox4x32(words, dropout_.key[0], dropout_.key[1]);
      ITM_FAST_UNROLLED
      for (int i = 0; i < 4; ++i) {
        if (four + i < count) body(four + i, drops_ && words[i] < dropout_.threshold ? 0.0f : kept_);
      }
    }
  }

 private:
  CounterDropout dropout_;
  const bool drops_;
  const float kept_;
};

}  // namespace itm_fast::cuda
