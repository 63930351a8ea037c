// The Gram matrix of one set on tensor cores: the products of its rows with themselves.
//
// Tiles on the diagonal copy their rows once (set_products.h). Those below it are those above it, transposed.
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/set_products.h"

namespace itm_fast::cuda {

// Calls store(row, column, product) for the matrix of n rows and gram_stride(n) columns, which is zero beyond n. For
// blocks of SetTile::kThreads.
template <int kParts, typename S, typename Store>
ITM_FAST_DEVICE void each_gram_product(const S* rows, int n, int64_t dim, bool is_aligned, const Store& store) {
  const int padding = gram_stride(n) - n;
  for (int first_row = 0; first_row < n; first_row += SetTile::kRows) {
    const int height = static_cast<int>(smaller(SetTile::kRows, n - first_row));
    for (int first_column = first_row; first_column < n; first_column += SetTile::kColumns) {
      const int width = static_cast<int>(smaller(SetTile::kColumns, n - first_column));
      const bool is_diagonal = first_row == first_column;
      const S *of_rows = rows + first_row * dim, *of_columns = rows + first_column * dim;
      if (is_diagonal) {
        multiply_sets<kParts, true>(of_rows, height, of_rows, height, dim, is_aligned);
      } else {
        multiply_sets<kParts, false>(of_rows, height, of_columns, width, dim, is_aligned);
      }
      for (int i = thread_index(); i < height * width; i += SetTile::kThreads) {
        const int row = i / width, column = i % width;
        const float product = product_of_planes(row, column);
        store(first_row + row, first_column + column, product);
        if (!is_diagonal) store(first_column + column, first_row + row, product);
      }
      barrier();  // The next product takes the place of this one.
    }
  }
  for (int i = thread_index(); i < n * padding; i += SetTile::kThreads) {
    store(i / padding, n + i % padding, 0.0f);
  }
}

// The place of |x_k|^2 in the matrix of n rows.
constexpr int64_t gram_diagonal(int64_t k, int n) { return k * (gram_stride(n) + 1); }

// Writes the matrix, its rows gram_stride(n) apart.
template <int kParts, typename S>
ITM_FAST_DEVICE void write_gram_of_set(const S* rows, int n, int64_t dim, bool is_aligned, float* gram) {
  const int stride = gram_stride(n);
  each_gram_product<kParts>(rows, n, dim, is_aligned,
                            [&](int row, int column, float product) { gram[row * stride + column] = product; });
}

}  // namespace itm_fast::cuda
