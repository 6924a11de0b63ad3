/* SPDX-License-Identifier: Apache-2.0 */
/* Stands for libcuda: cuLaunchKernelEx keeps what it was handed. Structures as cuda.h of CUDA 12 and 13 lays them out. */
#include <string.h>

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned int x, y, z;
    } cluster;
  } value;
} Attribute;

typedef struct {
  unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned int attribute_count;
} Config;

typedef struct {
  unsigned int launch[7], cluster[3], attribute_count;
  int attribute_id, integers[8];
  unsigned long long stream, function, pointers[8];
} Seen;

Seen seen;
int status = 0, pointers = 0, integers = 0, count = 0;

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  count++;
  memset(&seen, 0, sizeof seen);
  memcpy(seen.launch, config, sizeof seen.launch);
  seen.stream = (unsigned long long)config->stream;
  seen.function = (unsigned long long)function;
  seen.attribute_count = config->attribute_count;
  if (config->attribute_count) {
    seen.attribute_id = config->attributes->id;
    memcpy(seen.cluster, &config->attributes->value, sizeof seen.cluster);
  }
  /* As a kernel reads them: eight bytes of a pointer, four of an integer. */
  for (int i = 0; i < pointers; i++) memcpy(&seen.pointers[i], parameters[i], 8);
  for (int i = 0; i < integers; i++) memcpy(&seen.integers[i], parameters[pointers + i], 4);
  return extra ? -1 : status;
}
