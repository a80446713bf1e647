// SPDX-License-Identifier: Apache-2.0
// Norms, activation, rotary embedding, and the write into the paged cache.
#include "common.h"

namespace {

constexpr int64_t GRAIN = 16 << 10;  // elements that are worth a thread

int64_t grain(int64_t row) { return 1 + GRAIN / (row + 1); }

// fn(column, columns) over a row of n in registers, the last one in part.
template <class F> INLINE void for_columns(int64_t n, F&& fn) {
  int64_t d = 0;
  for (; d + VL <= n; d += VL) fn(d, VL);
  if (d < n) fn(d, (int)(n - d));
}
template <class T> INLINE vf get(const T* p, int n) { return n == VL ? load(p) : load_part(p, n); }
template <class T> INLINE void put(T* p, vf v, int n) {
  if (n == VL) store(p, v);
  else store_part(p, v, n);
}

// x [n0, n1, D] with strides; a weight of x's type is applied to the rounded value, a wider one before rounding.
template <class T, class W>
void rms_norm(int64_t n0, int64_t n1, int64_t D, const T* x, int64_t x0, int64_t x1, T* residual, int64_t r0,
              const W* weight, float eps, T* out, int64_t o0, int64_t o1, int threads) {
  for_range(threads, n0 * n1, grain(D), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* row = x + i / n1 * x0 + i % n1 * x1;
      T* to = out + i / n1 * o0 + i % n1 * o1;
      vf squares = {};
      if (residual) {
        T* res = residual + i * r0;
        for_columns(D, [&](int64_t d, int n) {
          vf v = round_to<T>(get(row + d, n) + get(res + d, n));
          put(res + d, v, n);
          squares = fma(v, v, squares);
        });
        row = res;
      } else {
        for_columns(D, [&](int64_t d, int n) {
          vf v = get(row + d, n);
          squares = fma(v, v, squares);
        });
      }
      vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)D + eps));
      for_columns(D, [&](int64_t d, int n) {
        vf v = get(row + d, n) * scale;
        if constexpr (std::is_same_v<T, W>) v = round_to<T>(v);
        put(to + d, v * get(weight + d, n), n);
      });
    }
  });
}

template <class T>
void silu_and_mul(int64_t rows, int64_t D, const T* x, int64_t ldx, T* out, int64_t ldo, int threads) {
  for_range(threads, rows, grain(4 * D), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for_columns(D, [&](int64_t d, int n) {
        vf g = get(x + i * ldx + d, n), u = get(x + i * ldx + D + d, n);
        put(out + i * ldo + d, round_to<T>(silu(g)) * u, n);
      });
  });
}

template <class T>
void rotate(int64_t heads, int64_t stride, int64_t half, const float* cos_sin, T* x) {
  for (int64_t h = 0; h < heads; h++) {
    T *a = x + h * stride, *b = a + half;
    for_columns(half, [&](int64_t d, int n) {
      vf c = get(cos_sin + d, n), s = get(cos_sin + half + d, n), u = get(a + d, n), v = get(b + d, n);
      put(a + d, u * c - v * s, n);
      put(b + d, v * c + u * s, n);
    });
  }
}

}  // namespace

EXPORT void vc_rms_norm(int dtype, int weight_dtype, int64_t n0, int64_t n1, int64_t D, const void* x, int64_t x0,
                        int64_t x1, void* residual, int64_t r0, const void* weight, float eps, void* out, int64_t o0,
                        int64_t o1, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    if (weight_dtype == FP32)
      rms_norm(n0, n1, D, (const T*)x, x0, x1, (T*)residual, r0, (const float*)weight, eps, (T*)out, o0, o1, threads);
    else
      rms_norm(n0, n1, D, (const T*)x, x0, x1, (T*)residual, r0, (const T*)weight, eps, (T*)out, o0, o1, threads);
  });
}

EXPORT void vc_silu_and_mul(int dtype, int64_t rows, int64_t D, const void* x, int64_t ldx, void* out, int64_t ldo,
                            int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    silu_and_mul(rows, D, (const T*)x, ldx, (T*)out, ldo, threads);
  });
}

EXPORT int vc_rotary(int dtype, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t rot_dim, int64_t positions,
                     const int64_t* position, void* q, int64_t q0, int64_t q1, void* k, int64_t k0, int64_t k1,
                     const float* cos_sin, int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (position[t] < 0 || position[t] >= positions) return 1;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    for_range(threads, tokens, grain(4 * (q_heads + k_heads) * rot_dim), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const float* cs = cos_sin + position[t] * rot_dim;
        rotate(q_heads, q1, rot_dim / 2, cs, (T*)q + t * q0);
        rotate(k_heads, k1, rot_dim / 2, cs, (T*)k + t * k0);
      }
    });
  });
  return 0;
}

// Caches [blocks, heads, block_size, D] with strides of block and head; element size is all the types share here.
EXPORT int vc_reshape_and_cache(int64_t tokens, int64_t heads, int64_t row_bytes, int64_t blocks, int64_t block_size,
                                const char* k, int64_t k0, int64_t k1, const char* v, int64_t v0, int64_t v1,
                                char* k_cache, int64_t kc0, int64_t kc1, char* v_cache, int64_t vc0, int64_t vc1,
                                const int64_t* slots, int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] < -1 || slots[t] >= blocks * block_size) return 1;
  for_range(threads, tokens, 1 + (64 << 10) / (heads * row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      if (slots[t] < 0) continue;
      int64_t block = slots[t] / block_size, at = slots[t] % block_size * row_bytes;
      for (int64_t h = 0; h < heads; h++) {
        std::memcpy(k_cache + block * kc0 + h * kc1 + at, k + t * k0 + h * k1, row_bytes);
        std::memcpy(v_cache + block * vc0 + h * vc1 + at, v + t * v0 + h * v1, row_bytes);
      }
    }
  });
  return 0;
}
