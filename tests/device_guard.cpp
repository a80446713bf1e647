// SPDX-License-Identifier: Apache-2.0
// A torch without XPU refuses to index tensors that say they are there: it has no guard that would switch to the device.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(XPU, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU>)
