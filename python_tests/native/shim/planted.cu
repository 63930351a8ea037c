// Two kernels with one fault each that compute-sanitizer must find. Usage: planted memcheck|racecheck.
#include <cstdio>
#include <cstring>

__global__ void write_behind_the_end(int* numbers, int size) { numbers[size + threadIdx.x] = 1; }

__global__ void read_without_a_barrier(int* numbers) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  numbers[threadIdx.x] = shared[63 - threadIdx.x];
}

int main(int count, char** arguments) {
  int* numbers = nullptr;
  if (count != 2 || cudaMalloc(&numbers, 64 * sizeof(int)) != cudaSuccess) return 2;
  if (std::strcmp(arguments[1], "memcheck") == 0) write_behind_the_end<<<1, 32>>>(numbers, 64);
  if (std::strcmp(arguments[1], "racecheck") == 0) read_without_a_barrier<<<1, 64>>>(numbers);
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  cudaFree(numbers);
  return 0;
}
