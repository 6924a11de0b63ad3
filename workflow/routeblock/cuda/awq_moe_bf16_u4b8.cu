// SPDX-License-Identifier: Apache-2.0
// awq_moe.cu for bfloat16 and uint4b8 alone.
#define AWQ_KIND AWQ_BF16_U4B8
#include "awq_moe.cu"
