// SPDX-License-Identifier: Apache-2.0
// The register-tile kernels of all shapes.
#include "gemm.h"

template <class W, class A> constexpr Kernels<W, A> all_shapes() {
  Kernels<W, A> k;
  k.template fill<MR_MAX, panels_of_tile(MR_MAX)>();
  return k;
}
template <class W, class A> const Kernels<W, A>& kernels() {
  static constexpr Kernels<W, A> table = all_shapes<W, A>();
  return table;
}
template const Kernels<float>& kernels();
template const Kernels<bf16>& kernels();
template const Kernels<fp16>& kernels();
#if HAS_BF16_DOT
template const Kernels<bf16, bf16>& kernels();
#endif
