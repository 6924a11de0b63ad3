// SPDX-License-Identifier: Apache-2.0
// awq_moe.cu for float16 and uint4 with zero points alone.
#define AWQ_KIND AWQ_F16_U4
#include "awq_moe.cu"
