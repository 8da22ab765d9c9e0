// Attention on tensor cores: heads of up to 256 dims, keys and values in bf16.
#include "attend_mma.cuh"

ATTEND(bf16, KvBf16, 256)
