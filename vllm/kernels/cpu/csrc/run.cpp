// SPDX-License-Identifier: Apache-2.0
// A list of operators, each with its record, in order.
#include "common.h"

struct Call { int64_t (*run)(const void*); const void* record; };
struct RunArgs { int64_t count; const Call* calls; };
// 0, or 1 + the place of the first that did not return 0; none runs after it.
OPERATOR(vc_run, RunArgs) {
  for (int64_t i = 0; i < a->count; i++)
    if (a->calls[i].run(a->calls[i].record)) return 1 + i;
  return 0;
}
