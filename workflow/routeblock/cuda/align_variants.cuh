// SPDX-License-Identifier: Apache-2.0
// The instances of align.cu, in step with VARIANTS in align_variants.py (a test compares them).
//           name          threads items cluster staged ballot
ALIGN_ONCE(staged_512x1b, 512, 1, 1, true, true)
ALIGN_ONCE(staged_512x4, 512, 4, 1, true, false)
ALIGN_TILES(tiles_1024x1, 1024, 1, false)
ALIGN_TILES(tiles_512x4, 512, 4, false)
#if defined(ROUTEBLOCK_ALL_VARIANTS) || __CUDA_ARCH__ >= 900
ALIGN_ONCE(cluster_8x256x1, 256, 1, 8, false, false)
ALIGN_ONCE(cluster_8x512x1, 512, 1, 8, false, false)
ALIGN_ONCE(cluster_16x512x1, 512, 1, 16, false, false)
ALIGN_ONCE(cluster_16x1024x1, 1024, 1, 16, false, false)
#endif
