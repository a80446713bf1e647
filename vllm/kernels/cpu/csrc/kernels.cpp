// SPDX-License-Identifier: Apache-2.0
// The register-tile kernels of all shapes.
#include "gemm.h"

template <class W> constexpr Kernels<W> all_shapes() {
  Kernels<W> k;
  k.template fill<MR_MAX, panels_of_tile(MR_MAX)>();
  return k;
}
template <class W> const Kernels<W>& kernels() {
  static constexpr Kernels<W> table = all_shapes<W>();
  return table;
}
template const Kernels<float>& kernels();
template const Kernels<bf16>& kernels();
template const Kernels<fp16>& kernels();
