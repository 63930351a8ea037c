// machine.h on a GPU of compute capability 8.0 or newer.
#pragma once

#include <cstdint>

#define ITM_FAST_DEVICE __device__ __forceinline__
#define ITM_FAST_DEVICE_APART inline __device__ __noinline__
#define ITM_FAST_UNROLLED _Pragma("unroll")
#define ITM_FAST_ROLLED _Pragma("unroll 1")
#define ITM_FAST_SHARED(type, name, size)            \
  __shared__ __align__(16) type name##_memory[size]; \
  const ::itm_fast::cuda::SharedArray<type> name { name##_memory }
#define ITM_FAST_DYNAMIC_SHARED(type, name, offset, size)                         \
  const ::itm_fast::cuda::SharedArray<type> name {                                \
    reinterpret_cast<type*>(::itm_fast::cuda::dynamic_shared_memory() + (offset)) \
  }

namespace itm_fast::cuda {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

// The dynamic shared memory of the launch, aligned to 16 bytes.
ITM_FAST_DEVICE unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(16) unsigned char itm_fast_dynamic_memory[];
  return itm_fast_dynamic_memory;
}

template <typename T>
struct SharedArray {
  T* memory;
  ITM_FAST_DEVICE T& operator[](int64_t index) const { return memory[index]; }
};

template <typename T>
ITM_FAST_DEVICE uint32_t shared_address(SharedArray<T> array, int64_t index) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(array.memory + index));
}

ITM_FAST_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
ITM_FAST_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
ITM_FAST_DEVICE int64_t block_index() { return blockIdx.x; }
ITM_FAST_DEVICE int64_t grid_blocks() { return gridDim.x; }
ITM_FAST_DEVICE int lane() { return thread_index() % 32; }
ITM_FAST_DEVICE int warp() { return thread_index() / 32; }

ITM_FAST_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

ITM_FAST_DEVICE void barrier() { __syncthreads(); }
ITM_FAST_DEVICE void warp_sync() { __syncwarp(); }
ITM_FAST_DEVICE void memory_fence() { __threadfence(); }

template <typename T>
ITM_FAST_DEVICE T shuffle(T value, int source_lane) {
  return __shfl_sync(kWholeWarp, value, source_lane);
}
template <typename T>
ITM_FAST_DEVICE T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(kWholeWarp, value, lane_mask);
}
ITM_FAST_DEVICE bool vote_any(bool value) { return __any_sync(kWholeWarp, value) != 0; }
ITM_FAST_DEVICE bool vote_all(bool value) { return __all_sync(kWholeWarp, value) != 0; }
ITM_FAST_DEVICE uint32_t ballot(bool value) { return __ballot_sync(kWholeWarp, value); }
ITM_FAST_DEVICE int count_bits(uint32_t bits) { return __popc(bits); }
ITM_FAST_DEVICE float exponential(float x) { return expf(x); }
ITM_FAST_DEVICE double exponential(double x) { return exp(x); }
ITM_FAST_DEVICE float logarithm_of_one_plus(float x) { return log1pf(x); }

// Returns the previous value.
ITM_FAST_DEVICE int32_t atomic_add(int32_t* target, int32_t value) { return atomicAdd(target, value); }
ITM_FAST_DEVICE int64_t atomic_add(int64_t* target, int64_t value) {
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value)));
}
ITM_FAST_DEVICE int32_t atomic_add(SharedArray<int32_t> target, int64_t index, int32_t value) {
  return atomicAdd(target.memory + index, value);
}
ITM_FAST_DEVICE uint64_t atomic_max(uint64_t* target, uint64_t value) {
  return atomicMax(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
}

template <typename T>
ITM_FAST_DEVICE T load_coherent(const T* source) {
  return *const_cast<const volatile T*>(source);
}

ITM_FAST_DEVICE void load_four(float (&values)[4], const float* source) {
  const float4 loaded = *reinterpret_cast<const float4*>(source);
  values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
}

ITM_FAST_DEVICE void grid_barrier(int32_t* arrived, int32_t round) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    while (load_coherent(arrived) < round * static_cast<int32_t>(gridDim.x)) {
    }
    __threadfence();
  }
  __syncthreads();
}

template <typename T>
ITM_FAST_DEVICE void copy_async(SharedArray<T> target, int64_t index, const T* source, int count) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(target, index)), "l"(source),
               "r"(count * static_cast<int>(sizeof(T)))
               : "memory");
}
ITM_FAST_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kStillUnderWay>
ITM_FAST_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kStillUnderWay) : "memory");
}

ITM_FAST_DEVICE void load_matrix(uint32_t (&parts)[4], SharedArray<uint16_t> source, int64_t index) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(shared_address(source, index))
               : "memory");
}
ITM_FAST_DEVICE void load_matrix_transposed(uint32_t (&parts)[4], SharedArray<uint16_t> source, int64_t index) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(shared_address(source, index))
               : "memory");
}

ITM_FAST_DEVICE float bf16_value(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
ITM_FAST_DEVICE float fp16_value(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(bits));
  return value;
}
ITM_FAST_DEVICE uint16_t bf16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(bits) : "f"(value));
  return bits;
}
ITM_FAST_DEVICE uint32_t bf16_pair(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
ITM_FAST_DEVICE uint16_t fp16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(bits) : "f"(value));
  return bits;
}

#define ITM_FAST_MMA(name, type)                                                                \
  ITM_FAST_DEVICE void name(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                         \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"                 \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));           \
  }
ITM_FAST_MMA(mma_bf16, "bf16")
ITM_FAST_MMA(mma_fp16, "f16")
#undef ITM_FAST_MMA

}  // namespace itm_fast::cuda
