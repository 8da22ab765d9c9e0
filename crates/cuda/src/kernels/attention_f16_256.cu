// Attention on tensor cores: heads of up to 256 dims, keys and values in f16.
#include "attend_mma.cuh"

ATTEND(f16, KvF16, 256)
