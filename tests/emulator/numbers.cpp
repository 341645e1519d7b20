// SPDX-License-Identifier: Apache-2.0
// The CPU ranks' number conversions, for kernels that run in the emulator: a library of their own,
// in a namespace of its own, because its headers are read there as a GPU reads them.
#define weft weft_on_a_cpu
#include <weft/device/cpu.hpp>

namespace emulated {

using namespace weft;

u32 narrow_bf16(float x) { return narrow<DType::bf16>(x); }
u32 narrow_fp16(float x) { return narrow<DType::fp16>(x); }
float widen_fp16(u32 bits) { return widen<DType::fp16>(u16(bits)); }
u32 to_e4m3(float x) { return weft::to_e4m3(x); }
float from_e4m3(u32 bits) { return weft::from_e4m3(u8(bits)); }

}  // namespace emulated
